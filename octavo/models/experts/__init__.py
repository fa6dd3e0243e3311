"""Mixtures of experts: what config.json says of them, how checkpoints name them, and how they are read."""
