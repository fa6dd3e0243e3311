"""Linear layers: one chooser, and the GEMMs it chooses from."""
