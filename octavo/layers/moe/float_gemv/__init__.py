"""The GEMV of 1 to 4 tokens' experts in bfloat16, float16 or float8 on Hopper GPUs."""
