"""Facts about the GPU and how kernels are launched on it. Imports nothing of ours."""
