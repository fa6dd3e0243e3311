"""The GEMV of a single token's packed experts on Hopper GPUs."""
