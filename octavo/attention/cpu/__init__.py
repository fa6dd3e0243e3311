"""The kernels in C, compiled on first use."""
