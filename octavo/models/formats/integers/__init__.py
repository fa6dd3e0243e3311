"""Layouts of matrices of integers, of 4 or 8 bits: AWQ, GPTQ, and two of compressed-tensors."""
