"""Mixtures of experts as Triton kernels; imported only where Triton runs."""
