"""Products of weights packed in 4 and 8 bits on every NVIDIA GPU with Triton."""
