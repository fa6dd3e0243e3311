"""The GEMM for 3 to 256 rows on Hopper GPUs."""
