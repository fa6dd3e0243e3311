"""Who shares which keys, and how that is cut into work: for the host's kernels and for the device's."""
