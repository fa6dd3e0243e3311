"""The small layers in C, called through ctypes; without a C compiler, torch's operators do their work."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from octavo.gemm.cpu.library import compile_failure, layers_library


def unsupported_reason(*tensors: Tensor) -> str | None:
    """Say why the compiled layers cannot work on [T, n] tensors; None: they can.

    Called per layer and step.
    """
    for tensor in tensors:
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return "they need contiguous float32 tensors on a CPU"
    return compile_failure()


@cache
def compiled_layers() -> "CompiledLayers":
    """Return the compiled layers; compiles them in the first call of a process.

    Raises:
        KernelUnavailableError: they cannot be compiled.
    """
    return CompiledLayers(layers_library())


class CompiledLayers:
    """Fused layers on contiguous float32 CPU tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._add_rms_norm = library.octavo_add_rms_norm
        self._silu_and_multiply = library.octavo_silu_and_multiply

    def add_rms_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add delta to hidden [T, n] in place, if given, and return the normed sum, a new [T, n]."""
        out = torch.empty_like(hidden)
        self._add_rms_norm(
            hidden.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            *hidden.shape,
            eps,
            torch.get_num_threads(),
        )
        return out

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, a new [T, n], of [T, 2 n] = [gate | up]."""
        rows, double = gate_up.shape
        out = torch.empty(rows, double // 2, dtype=torch.float32)
        self._silu_and_multiply(
            gate_up.data_ptr(), out.data_ptr(), rows, double // 2, torch.get_num_threads()
        )
        return out
