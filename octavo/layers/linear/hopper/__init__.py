"""The GEMM for 5 to 256 rows on Hopper GPUs."""
