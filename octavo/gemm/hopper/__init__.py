"""Products for Hopper GPUs: persistent programs that stream weights by TMA, one room a form of weight."""
