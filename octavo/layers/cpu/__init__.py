"""Layers in C, compiled on first use: norm, activation, GEMMs, experts, whole stacks of decoder layers."""
