"""Weights in blocks, tiled and multiplied in C, called through ctypes."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.errors import OutOfMemoryError
from octavo.gemm.cpu.huge_pages import HugePages
from octavo.gemm.cpu.library import layers_library

# Numbers that share a scale; bytes of a group of inputs.
_BLOCK = 32
GROUP = 4

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class Tiles(ctypes.Structure):
    """Tiles of blocks.h: a weight as the kernel reads it. The caller keeps the tensors alive."""

    _fields_ = [
        *((name, _POINTER) for name in ("quants", "scales", "mins")),
        ("num_rows", _INT),
        *((name, ctypes.c_int) for name in ("bits", "scale_bytes", "halves")),
    ]


def tile_rows() -> int:
    """Return R, how many rows of a weight lie side by side for this CPU: 8 or 16.

    Raises:
        KernelUnavailableError: the kernel cannot be compiled.
    """
    return layers_library().octavo_tile()


def tile_blocks(
    stored: Tensor, num_tiles: int, bits: int, has_mins: bool, pages: HugePages | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tile blocks of a file in one pass; see tiles.c.

    Args:
        stored: [N, K / 32, bytes of a block] uint8, contiguous; see StoredBlocks.
        num_tiles: at least N / R; what lies beyond N is 0.
        bits: of a number, 4 or 8.
        has_mins: a block has a minimum.
        pages: memory for the tiles; None: torch's.

    Returns:
        quants [tiles, K / 32, 4 or 8, R, 4] uint8 (4 bits) or int8; scales [tiles, K / 32, R] float16, or
        uint8 if they are exponents; mins likewise, float16.

    Raises:
        KernelUnavailableError: the kernel cannot be compiled.
    """
    num_rows, num_blocks, block_bytes = stored.shape
    groups = bits * _BLOCK // 8 // GROUP
    scale_bytes = block_bytes - groups * GROUP - (2 if has_mins else 0)
    assert stored.is_contiguous(), "blocks that lie apart"
    tile = tile_rows()
    assert num_rows <= num_tiles * tile, f"{num_rows} rows in {num_tiles} tiles"
    assert scale_bytes in (1, 2), f"blocks of {block_bytes} bytes"
    number = torch.uint8 if bits == 4 else torch.int8
    zeros = torch.zeros if pages is None else pages.zeros
    quants = zeros((num_tiles, num_blocks, groups, tile, GROUP), dtype=number)
    scale = torch.float16 if scale_bytes == 2 else torch.uint8
    scales = zeros((num_tiles, num_blocks, tile), dtype=scale)
    mins = zeros(scales.shape, dtype=torch.float16) if has_mins else None
    tiles = quants.data_ptr(), scales.data_ptr(), None if mins is None else mins.data_ptr()
    sizes = num_rows, num_blocks, groups, scale_bytes
    layers_library().octavo_tile_blocks(stored.data_ptr(), *sizes, *tiles)
    return quants, scales, mins


def tile_codes(
    values: Tensor, exponents: Tensor, num_tiles: int, pages: HugePages | None
) -> tuple[Tensor, Tensor]:
    """Tile numbers of MXFP4 in one pass; see tiles.c.

    Args:
        values, exponents: of an Mxfp4Weight [N, K], contiguous.
        num_tiles: at least N / R; what lies beyond N is 0.
        pages: memory for the tiles; None: torch's.

    Returns:
        quants [tiles, K / 32, 4, R, 4] uint8, and scales [tiles, K / 32, R] uint8: the exponents.

    Raises:
        KernelUnavailableError: the kernel cannot be compiled.
    """
    num_rows, num_blocks = exponents.shape
    tile = tile_rows()
    assert values.is_contiguous(), "numbers that lie apart"
    assert exponents.is_contiguous(), "exponents that lie apart"
    assert num_rows <= num_tiles * tile, f"{num_rows} rows in {num_tiles} tiles"
    zeros = torch.zeros if pages is None else pages.zeros
    quants = zeros((num_tiles, num_blocks, _BLOCK // 2 // GROUP, tile, GROUP), dtype=torch.uint8)
    scales = zeros((num_tiles, num_blocks, tile), dtype=torch.uint8)
    stored, tiles = (values.data_ptr(), exponents.data_ptr()), (quants.data_ptr(), scales.data_ptr())
    layers_library().octavo_tile_codes(*stored, num_rows, num_blocks, *tiles)
    return quants, scales


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
