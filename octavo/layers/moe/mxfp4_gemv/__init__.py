"""The GEMV of a single token's experts in MXFP4 on Hopper GPUs."""
