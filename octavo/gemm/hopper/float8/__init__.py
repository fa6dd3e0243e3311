"""The product of many float8 rows on Hopper GPUs."""
