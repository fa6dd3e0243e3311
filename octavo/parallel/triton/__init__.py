"""Kernels by which ranks sum over memory that all their GPUs map; imported only where Triton runs."""
