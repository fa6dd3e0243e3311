"""Products for every NVIDIA GPU with Triton."""
