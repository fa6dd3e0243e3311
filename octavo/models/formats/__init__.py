"""Files that hold weights: GGUF, safetensors, and dummy weights made of a seed."""
