"""The GEMV of one row with a packed weight of 4 bits on Hopper GPUs."""
