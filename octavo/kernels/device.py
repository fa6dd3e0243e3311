"""Facts about a GPU that kernels and their tilings are chosen by. Importing this imports no Triton."""

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

from octavo.errors import ConfigError

GENERATION_VARIABLE = "OCTAVO_GPU_GENERATION"
_HOPPER_SHARED_BYTES = 227 * 1024
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n; 1 for less than 1.

    Triton's own function is for kernels: a call of it on the host takes a good part of a launch's time.
    """
    return 1 << max(0, n - 1).bit_length()


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return how many SMs a GPU has; 2 stand in where Triton's interpreter runs on a CPU."""
    if device.type == "cpu":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that a program can have: 227 KiB on Hopper, 99 KiB on RTX cards.

    Hopper's stand in for other devices.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return _HOPPER_SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@cache
def nvidia_generation(device: torch.device) -> int:
    """Return the major number of an NVIDIA GPU's compute capability, 9 for Hopper; 0 for other devices.

    The environment variable OCTAVO_GPU_GENERATION, read once, names an older generation whose kernels are
    taken instead, so that the portable ones can be measured and tested on a newer GPU.

    Raises:
        ConfigError: the variable is not a generation from 8 to that of the GPU.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    generation = torch.cuda.get_device_capability(device)[0]
    named = os.environ.get(GENERATION_VARIABLE, "")
    if named and named not in map(str, range(8, generation + 1)):
        raise ConfigError(f"{GENERATION_VARIABLE} must be 8 to {generation}, that of this GPU, got {named!r}")
    return int(named or generation)


def can_overlap(device: torch.device) -> bool:
    """Say whether a kernel can start on the device while the one before it still runs."""
    return nvidia_generation(device) >= 9


def triton_unsupported_reason(device_type: str) -> str | None:
    """Say why Triton's kernels cannot run on a type of device; None: they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device_type != "cuda":
        return f"it is written for NVIDIA GPUs, not for {device_type}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return "it needs a GPU of compute capability 8.0 or later"
    return None


def has_triton(tensor: Tensor) -> bool:
    """Return whether a tensor holds floats on a GPU for which Triton compiles."""
    return tensor.is_cuda and tensor.dtype in _FLOATS and _has_triton()


@cache
def _has_triton() -> bool:
    return triton_unsupported_reason("cuda") is None
