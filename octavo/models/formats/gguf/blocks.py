"""Reads GGUF tensors into BlockWeights: the file's own integers and scales, without rounding anything.

    type           bits   scale of        min           in the file
    Q4_0           4      32              -8 scale      d  q[16]
    Q4_1           4      32              yes           d  m  q[16]
    Q5_0, Q5_1     8      32              Q5_1          d (m) h[4] q[16]
    Q8_0           8      32                            d  q[32]
    Q4_K, Q5_K     4, 8   32: d * sc      -dmin * mn    d  dmin  sc, mn: 6 bits [12]  (h[32])  q[128]
    Q6_K           8      16: d * sc                    q[128]  h[64]  sc[16] int8  d

Q*_K have 256 numbers a block, the others 32. Source: ggml's block layouts.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from octavo.layers.linear.block_weight import BLOCK, BlockWeight
from octavo.models.formats.gguf.dequantize import five_bits, float16_at, put_nibbles

# Integers [n, 32 or 256], scales and mins [n, ...], of n blocks of the file.
Blocks = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def has_blocks(type_name: str) -> bool:
    """Return whether `blocks_of` knows a type."""
    return type_name in _TYPES


def bytes_of_a_number(type_name: str, *, on_gpu: bool = False) -> float:
    """Return the bytes that a number of a type takes in memory, scales included."""
    if on_gpu:
        # A scale and a minimum, in float16.
        return _TYPES[type_name][0] / 8 + 4 / (BLOCK // 2 if type_name == "Q6_K" else BLOCK)
    num_scales = 1 if type_name in ("Q5_0", "Q8_0") else 2
    scale_bytes = 4 if type_name.endswith("K") else 2
    return _TYPES[type_name][0] / 8 + num_scales * scale_bytes / BLOCK


def blocks_of(type_name: str, stored: np.ndarray) -> BlockWeight:
    """Return the weight that blocks of a file make.

    Args:
        type_name: one of those above.
        stored: [rows, blocks of a row, bytes of a block] uint8.
    """
    bits, unpack = _TYPES[type_name]
    num_rows = stored.shape[0]
    quants, scales, mins = unpack(stored.reshape(-1, stored.shape[2]))
    return _narrowed(
        bits,
        torch.from_numpy(quants.reshape(num_rows, -1)),
        torch.from_numpy(scales.reshape(num_rows, -1)),
        None if mins is None else torch.from_numpy(mins.reshape(num_rows, -1)),
    )


def _narrowed(bits: int, quants: Tensor, scales: Tensor, mins: Tensor | None) -> BlockWeight:
    """Keep scales in float16 if that is exact, and there is one for each block."""
    both = (scales,) if mins is None else (scales, mins)
    is_whole = scales.shape[1] * BLOCK == quants.shape[1]
    if is_whole and all(torch.equal(values.half().float(), values) for values in both):
        scales, mins = scales.half(), None if mins is None else mins.half()
    return BlockWeight(bits, quants, scales, mins)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[n, 16] uint8 to [n, 32]."""
    values = np.empty((packed.shape[0], BLOCK), np.uint8)
    put_nibbles(packed, values)
    return values


def _q4_0(blocks: np.ndarray) -> Blocks:
    scales = float16_at(blocks, 0)
    return _nibbles(blocks[:, 2:]), scales, -8 * scales


def _q4_1(blocks: np.ndarray) -> Blocks:
    return _nibbles(blocks[:, 4:]), float16_at(blocks, 0), float16_at(blocks, 2)


def _q5_0(blocks: np.ndarray) -> Blocks:
    values = five_bits(blocks[:, 6:], blocks[:, 2:6]).view(np.int8)
    values -= 16
    return values, float16_at(blocks, 0), None


def _q5_1(blocks: np.ndarray) -> Blocks:
    values = five_bits(blocks[:, 8:], blocks[:, 4:8]).view(np.int8)
    return values, float16_at(blocks, 0), float16_at(blocks, 2)


def _q8_0(blocks: np.ndarray) -> Blocks:
    return blocks[:, 2:].view(np.int8).copy(), float16_at(blocks, 0), None


def _q4_k(blocks: np.ndarray) -> Blocks:
    scales, mins = _scales_and_mins(blocks)
    return _nibbles_of_64(blocks[:, 16:]), scales, mins


def _q5_k(blocks: np.ndarray) -> Blocks:
    scales, mins = _scales_and_mins(blocks)
    # Bit i of a byte of h is the fifth bit of a number of the i-th 32.
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    values = _nibbles_of_64(blocks[:, 48:]) | (fifth << 4).reshape(len(blocks), -1)
    return values.view(np.int8), scales, mins


def _q6_k(blocks: np.ndarray) -> Blocks:
    # Twice 128 numbers: low halves of 64 bytes, then their high halves; two more bits each in 32 bytes.
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    nibbles = np.concatenate((low & 15, low >> 4), axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    values = (nibbles | high << 4).reshape(len(blocks), -1).view(np.int8)
    return values - np.int8(32), blocks[:, 192:208].view(np.int8) * float16_at(blocks, 208), None


def _nibbles_of_64(packed: np.ndarray) -> np.ndarray:
    """[n, 128] uint8 to [n, 256]: the low halves of 32 bytes, then their high halves."""
    parts = packed.reshape(-1, 4, 1, 32)
    return np.concatenate((parts & 15, parts >> 4), axis=2).reshape(len(packed), -1)


def _scales_and_mins(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [n, 8] scales and minimums of a Q4_K or Q5_K.

    12 bytes:   0-3  scales 0-3, high bits: top of scales 4-7
                4-7  mins 0-3, high bits: top of mins 4-7
                8-11 low halves: scales 4-7; high halves: mins 4-7
    """
    first, second, third = (blocks[:, start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=1)
    mins = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=1)
    return scales * float16_at(blocks, 0), mins * -float16_at(blocks, 2)


_TYPES: Mapping[str, tuple[int, Callable[[np.ndarray], Blocks]]] = MappingProxyType(
    {
        "Q4_0": (4, _q4_0),
        "Q4_1": (4, _q4_1),
        "Q5_0": (8, _q5_0),
        "Q5_1": (8, _q5_1),
        "Q8_0": (8, _q8_0),
        "Q4_K": (4, _q4_k),
        "Q5_K": (8, _q5_k),
        "Q6_K": (8, _q6_k),
    }
)
