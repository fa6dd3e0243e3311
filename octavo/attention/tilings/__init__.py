"""Tilings of the GPU kernels as numbers, and which are taken; nothing here imports Triton."""
