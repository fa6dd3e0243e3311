"""Products for Hopper GPUs: programs that stay (persistent) and stream weights by TMA."""
