"""Weights of 4-bit floats (MXFP4) on any device; experts on a GPU are in layers.moe."""
