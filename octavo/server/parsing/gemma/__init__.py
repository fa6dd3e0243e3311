"""Tool calls as Gemma 4 writes them: read, and held to schemas."""
