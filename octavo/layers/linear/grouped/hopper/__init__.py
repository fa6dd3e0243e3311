"""The product of 17 to 256 rows and a weight of 4 bits on Hopper GPUs."""
