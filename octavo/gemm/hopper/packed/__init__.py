"""Products of weights packed in 4 and 8 bits on Hopper GPUs."""
