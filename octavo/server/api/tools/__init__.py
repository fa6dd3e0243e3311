"""Tools and reasoning: what a chat asks for, and how its answer tells of them."""
