"""Attention's own kernels of a decode step: rotate and store, and one launch for small steps; Triton only."""
