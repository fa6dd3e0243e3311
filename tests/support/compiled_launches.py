"""Compiles what launchers launch for a GPU that need not be there, in a process without the interpreter.

Importing this makes Triton take the machine for one with that GPU. Tensors stay on the CPU, since nothing
runs.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from octavo.kernels import device, launch

# Compute capability: 90 for Hopper, 80 for the first Ampere.
_CAPABILITY = int(os.environ.get("COMPILED_CAPABILITY", "90"))
_MULTIPROCESSORS = 132


class _Driver:
    """What Triton asks before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", _CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


triton.runtime.driver.set_active(_Driver())
# Before a tiling imports them by name.
device.nvidia_generation = lambda device: _CAPABILITY // 10
device.num_multiprocessors = lambda device: _MULTIPROCESSORS
device.has_triton = lambda tensor: True
launch.can_overlap = lambda device: _CAPABILITY >= 90


def compiled_by(call: Callable[[], Any]) -> list[CompiledKernel]:
    """Run a call whose launches compile and run nothing; return the kernels in their order."""
    found = list[CompiledKernel]()
    run = JITFunction.run

    def run_and_note(self: JITFunction, *arguments: Any, **options: Any) -> CompiledKernel:
        found.append(run(self, *arguments, **options))
        return found[-1]

    JITFunction.run = run_and_note
    try:
        with launch.dry_run():
            call()
    finally:
        JITFunction.run = run
    return found


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor for a launcher; its numbers do not matter."""
    return torch.empty(shape, dtype=dtype)
