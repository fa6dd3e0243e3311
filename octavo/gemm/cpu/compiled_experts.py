"""The experts of a layer whose weights are in blocks, run in C by one call, through ctypes."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.errors import OutOfMemoryError
from octavo.gemm.cpu.compiled_blocks import CompiledLinear
from octavo.gemm.cpu.library import layers_library
from octavo.kernels.clamped_swiglu import LIMIT, SLOPE
from octavo.kernels.clamped_swiglu import NAME as CLAMPED

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
ACTIVATIONS = ("silu", CLAMPED)
"""Those that experts may have."""


class _Experts(ctypes.Structure):
    """Experts of experts.h."""

    _fields_ = [
        *((name, _POINTER) for name in ("gate_up", "down")),
        *((name, _INT) for name in ("number", "hidden", "inner")),
        *((name, ctypes.c_float) for name in ("limit", "slope")),
    ]


class _Step(ctypes.Structure):
    """Step of experts.h."""

    _fields_ = [
        *((name, _POINTER) for name in ("x", "experts", "weights", "out")),
        *((name, _INT) for name in ("tokens", "k")),
        ("adds", ctypes.c_int),
    ]


class CompiledExperts:
    """Experts as the kernel knows them."""

    def __init__(
        self, gate_up: Sequence[CompiledLinear], down: Sequence[CompiledLinear], activation: str
    ) -> None:
        """Keep each expert's layers, from hidden to [gate | up], and from as many as gate has to hidden.

        Raises:
            KernelUnavailableError: the kernel cannot be compiled.
        """
        addresses = [(_POINTER * len(each))(*(linear.address for linear in each)) for each in (gate_up, down)]
        self._alive = gate_up, down, addresses
        self._hidden = down[0].num_outputs
        limits = (LIMIT, SLOPE) if activation == CLAMPED else (0.0, 0.0)
        self._experts = _Experts(
            *map(ctypes.addressof, addresses), len(down), self._hidden, gate_up[0].num_outputs // 2, *limits
        )
        self._run = layers_library().octavo_run_experts

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """Return each token's sum, in the order of its choice; see moe.experts.Experts.

        Args:
            x: [T, hidden] float32, contiguous.
            experts: [T, k] int32, contiguous; those beyond the experts that are here count nothing.
            weights: [T, k] float32, contiguous.
            residual: [T, hidden] float32, contiguous, to which the sums are added; or None.

        Raises:
            OutOfMemoryError: there is none for the rows of all pairs.
        """
        out = torch.empty(x.shape[0], self._hidden, dtype=torch.float32) if residual is None else residual
        tensors = (each.data_ptr() for each in (x, experts, weights, out))
        step = _Step(*tensors, *experts.shape, residual is not None)
        if self._run(ctypes.byref(self._experts), ctypes.byref(step), torch.get_num_threads()):
            raise OutOfMemoryError(f"no memory for the experts of {x.shape[0]} tokens")
        return out
