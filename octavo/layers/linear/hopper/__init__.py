"""The GEMM for 2 to 256 rows on Hopper GPUs."""
