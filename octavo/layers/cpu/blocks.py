"""The product with weights in blocks, in C, called through ctypes."""

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.attention.cpu.compile import KernelUnavailableError, Library, load_library
from octavo.errors import OutOfMemoryError

# Rows of a weight that lie side by side.
TILE = 8

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_LIBRARY = Library("blocks", (Path(__file__).parent / "blocks.c",), ())


class Tiles(NamedTuple):
    """A weight as the kernel reads it; whoever makes this keeps the tensors.

    Attributes:
        addresses: of its integers, scales and minimums (0: none); see linear.blocks.TiledBlocks.
        num_rows: N.
        form: bits of an integer, whether scales are float16, scales of a block.
    """

    addresses: tuple[int, int, int]
    num_rows: int
    form: tuple[int, bool, int]


@cache
def compile_failure() -> str | None:
    """Return why the kernel cannot be compiled here, or None if it can; compiles it in the first call."""
    try:
        compiled_blocks()
    except KernelUnavailableError as error:
        return str(error)
    return None


@cache
def compiled_blocks() -> "CompiledBlocks":
    """Return the kernel; compiles it in the first call of a process.

    Raises:
        KernelUnavailableError: it cannot be compiled.
    """
    return CompiledBlocks(load_library(_LIBRARY))


class CompiledBlocks:
    """The kernel."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._multiply = library.octavo_block_linear
        self._multiply.argtypes = [*[_POINTER] * 6, *[_INT] * 4, *[ctypes.c_int] * 4]
        self._multiply.restype = ctypes.c_int

    def multiply(self, x: Tensor, tiles: Tiles, bias: int, out: Tensor, column: int) -> None:
        """Write x W^T + b into columns of out.

        Args:
            x: [T, K] float32, contiguous.
            tiles: W [N, K].
            bias: address of b [N] float32; 0: none.
            out: [T, n] float32, contiguous.
            column: the first of N columns that are overwritten.

        Raises:
            OutOfMemoryError: there is none for the rows of x in 8 bits.
        """
        failed = self._multiply(
            x.data_ptr(),
            *tiles.addresses,
            bias,
            out.data_ptr() + column * out.element_size(),
            x.shape[0],
            x.shape[1],
            tiles.num_rows,
            out.shape[1],
            *tiles.form,
            torch.get_num_threads(),
        )
        if failed:
            raise OutOfMemoryError(f"no memory to multiply {x.shape[0]} rows of {x.shape[1]} numbers")
