"""Norm, rotary embedding and activation as Triton kernels. Importing the package imports no Triton."""
