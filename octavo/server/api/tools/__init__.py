"""The tools that requests give."""
