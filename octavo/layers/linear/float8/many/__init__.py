"""The GEMM of many float8 rows for Hopper GPUs."""
