"""Products of float16, bfloat16 and float8 weights on Hopper GPUs, of few rows."""
