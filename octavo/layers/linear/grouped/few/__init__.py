"""The GEMM of 1 to 16 rows with a packed weight on NVIDIA GPUs."""
