"""GGUF files: header, config, tensors, and weights that stay in their blocks."""
