"""Products of experts in MXFP4 on Hopper GPUs."""
