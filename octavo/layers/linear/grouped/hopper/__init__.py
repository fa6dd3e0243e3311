"""The GEMM of 17 to 256 rows with a weight of 4 bits on Hopper GPUs."""
