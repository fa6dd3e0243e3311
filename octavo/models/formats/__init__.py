"""Weight formats: GGUF, safetensors, and dummy weights made from a seed."""
