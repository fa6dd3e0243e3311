"""Weights in blocks that stay packed on a GPU; layers are made by `linear`, the others import Triton."""
