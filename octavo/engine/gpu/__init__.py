"""How a step runs on an NVIDIA GPU: the runner, the device's rows, CUDA graphs."""
