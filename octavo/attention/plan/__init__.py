"""Plans: which sequences share which keys, and the work of the kernels on the host and on the GPU."""
