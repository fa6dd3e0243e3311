"""Float8 (e4m3) weights: their form, and the GEMMs that multiply them on CPUs and GPUs."""
