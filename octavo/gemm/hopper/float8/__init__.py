"""The persistent GEMM of many float8 rows on Hopper GPUs."""
