"""Grouped GEMMs of MXFP4 experts on Hopper GPUs."""
