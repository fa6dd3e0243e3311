"""Host arrays to a device, without waiting for it."""

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a host array as a tensor on the device; on a CPU the two share memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        # Copies from memory that is not pinned wait for what the device is doing.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def copy_to(target: torch.Tensor, array: np.ndarray) -> None:
    """Copy a host array to a tensor on a GPU."""
    target.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)
