"""Products of up to 256 rows with float16, bfloat16 and float8 weights on Hopper GPUs."""
