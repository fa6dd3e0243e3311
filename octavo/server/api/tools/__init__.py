"""Tools and reasoning: what a chat asks for, and how its answer shows them."""
