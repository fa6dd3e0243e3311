"""Triton kernels of octavo.ops."""
