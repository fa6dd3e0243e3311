"""The GEMV for Hopper GPUs: the product of a single row, which streams weights through shared memory."""
