"""Norm and activation in C, compiled on first use."""
