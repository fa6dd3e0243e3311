"""Arrays between host and device, without waiting for it."""

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a host array as a tensor on the device; on a CPU the two share memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        # A copy from memory that is not pinned would wait for the device.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def copy_to(target: torch.Tensor, array: np.ndarray) -> None:
    """Copy a host array to a tensor on a GPU."""
    target.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host; on a CPU the tensor itself.

    A copy from a GPU has arrived once an event recorded after this call has.
    """
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
