"""Kernels for Hopper GPUs, in Gluon. Importing the package imports no Triton."""
