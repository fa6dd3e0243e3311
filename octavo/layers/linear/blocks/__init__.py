"""Weights in blocks of 32 numbers, multiplied as they are by C kernels: what GGUF files hold, on CPUs."""
