"""Products of weights packed in 4 bits on Hopper GPUs."""
