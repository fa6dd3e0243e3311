"""The product with weights in blocks, in C, called through ctypes."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.errors import OutOfMemoryError
from octavo.layers.cpu.library import layers_library

# Rows of a weight that lie side by side.
TILE = 8

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class Tiles(ctypes.Structure):
    """Tiles of blocks.h: a weight as the kernel reads it. The caller keeps the tensors alive."""

    _fields_ = [
        *((name, _POINTER) for name in ("quants", "scales", "mins")),
        ("num_rows", _INT),
        *((name, ctypes.c_int) for name in ("bits", "is_half", "halves")),
    ]


class _Linear(ctypes.Structure):
    """Linear of blocks.h."""

    _fields_ = [("parts", _POINTER), ("num_parts", _INT), ("num_outputs", _INT), ("bias", _POINTER)]


class CompiledLinear:
    """Weights that lie above one another, and a bias, as the kernel knows them.

    Attributes:
        num_outputs: N, over all weights.
        address: of Linear of blocks.h, valid as long as this object.
    """

    def __init__(self, parts: Sequence[Tiles], bias: Tensor | None) -> None:
        """Keep weights [N_i, K], which may move later, and bias [sum of N_i] float32.

        Raises:
            KernelUnavailableError: the kernel cannot be compiled.
        """
        self.num_outputs = sum(part.num_rows for part in parts)
        self._alive = (parts, bias)
        self._parts = (_POINTER * len(parts))(*map(ctypes.addressof, parts))
        address = None if bias is None else bias.data_ptr()
        self._linear = _Linear(ctypes.addressof(self._parts), len(parts), self.num_outputs, address)
        self.address = ctypes.addressof(self._linear)
        self._multiply = layers_library().octavo_block_linear

    def __call__(self, x: Tensor, out: Tensor, column: int) -> None:
        """Write x W^T + b into columns of out.

        Args:
            x: [T, K] float32, contiguous.
            out: [T, n] float32, contiguous.
            column: the first of N columns that are overwritten.

        Raises:
            OutOfMemoryError: there is none for the rows of x in 8 bits.
        """
        address, threads = out.data_ptr() + column * out.element_size(), torch.get_num_threads()
        if self._multiply(self.address, x.data_ptr(), address, *x.shape, out.shape[1], threads):
            raise OutOfMemoryError(f"no memory to multiply {x.shape[0]} rows of {x.shape[1]} numbers")
