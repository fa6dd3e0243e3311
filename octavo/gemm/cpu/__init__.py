"""Products on CPUs, by C compiled on first use, MKL and oneDNN."""
