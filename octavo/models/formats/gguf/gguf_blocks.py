"""Reads GGUF tensors into quantised weights: the file's own integers and scales, without rounding anything.

    type           bits   scale of        min           in the file
    Q4_0           4      32              -8 scale      d  q[16]
    Q4_1           4      32              yes           d  m  q[16]
    Q5_0, Q5_1     8      32              Q5_1          d (m) h[4] q[16]
    Q8_0           8      32                            d  q[32]
    Q4_K, Q5_K     4, 8   32: d * sc      -dmin * mn    d  dmin  sc, mn: 6 bits [12]  (h[32])  q[128]
    Q6_K           8      16: d * sc                    q[128]  h[64]  sc[16] int8  d
    MXFP4          4      32: 2 ** (e - 127)            e uint8  q[16]: codes of floats, see mxfp4.weight

Q*_K have 256 numbers a block, the others 32. Source: ggml's block layouts.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from octavo.forms.base import Storage
from octavo.forms.blocks import BLOCK, BlockWeight
from octavo.forms.mxfp4 import MXFP4, Mxfp4Weight, check_exponents
from octavo.forms.stored_blocks import StoredBlocks

GGUFBlocks = BlockWeight | StoredBlocks | Mxfp4Weight
# Scales and mins [n, ...] of n blocks of the file.
Scales = tuple[Tensor, Tensor | None]

# Values unpacked at a time.
_CHUNK = 2**20


def storage_of(type_name: str) -> Storage:
    """Return what a matrix of a type takes in memory; types without such blocks are dequantised."""
    if type_name == MXFP4.form:
        return MXFP4
    if type_name not in _TYPES:
        return Storage("odd blocks", 4, form=type_name)
    bits = _TYPES[type_name][0]
    num_scales = 1 if type_name in ("Q5_0", "Q8_0") else 2
    scale_bytes = 4 if type_name.endswith("K") else 2
    # A GPU has a scale and a minimum, in float16.
    on_gpu = bits / 8 + 4 / (BLOCK // 2 if type_name == "Q6_K" else BLOCK)
    return Storage(
        "blocks",
        bits / 8 + num_scales * scale_bytes / BLOCK,
        bytes_on_gpu=on_gpu,
        form=type_name,
        bits=bits,
        tile=(1, BLOCK // 2 if type_name == "Q6_K" else BLOCK),
    )


def read_as_stored(type_name: str, stored: Tensor) -> GGUFBlocks:
    """Return the weight that blocks of a file make on a CPU, as they are if kernels take them so.

    Args:
        type_name: one of those above.
        stored: [rows, blocks of a row, bytes of a block] uint8.

    Raises:
        WeightsError: see quantised_of.
    """
    if type_name not in _AS_STORED:
        return quantised_of(type_name, stored)
    if type_name == MXFP4.form:
        check_exponents("a tensor of the file", stored[:, :, 0])
    bits, has_mins = _AS_STORED[type_name]
    return StoredBlocks(bits, has_mins, stored.contiguous(), partial(quantised_of, type_name))


def quantised_of(type_name: str, stored: Tensor) -> BlockWeight | Mxfp4Weight:
    """Return the weight that blocks of a file make, on their device.

    Args:
        type_name, stored: see read_as_stored.

    Raises:
        WeightsError: an exponent stands for no number.
    """
    return _mxfp4_of(stored) if type_name == MXFP4.form else blocks_of(type_name, stored)


def _mxfp4_of(stored: Tensor) -> Mxfp4Weight:
    """Reorder numbers: the file has number i beside number i + 16, an Mxfp4Weight beside i + 1."""
    exponents = stored[:, :, 0].contiguous()
    check_exponents("a tensor of the file", exponents)
    even, odd = stored[:, :, 1:].unflatten(2, (-1, 2)).unbind(3)
    first, second = (even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)
    return Mxfp4Weight(torch.cat((first, second), 2).flatten(1), exponents)


def blocks_of(type_name: str, stored: Tensor) -> BlockWeight:
    """Return the weight that blocks of integers make, on their device, unpacked some rows at a time.

    Args:
        type_name: one of those above.
        stored: [rows, blocks of a row, bytes of a block] uint8.
    """
    bits, unpack = _TYPES[type_name]
    num_rows, num_blocks, num_bytes = stored.shape
    block = 256 if type_name.endswith("K") else BLOCK
    quants = stored.new_empty(num_rows, num_blocks * block)
    scales, mins = [], []
    step = max(1, _CHUNK // max(1, quants.shape[1]))
    for start in range(0, num_rows, step):
        rows = stored[start : start + step]
        out = quants[start : start + step].view(-1, block)
        part_scales, part_mins = unpack(rows.reshape(-1, num_bytes), out)
        scales.append(part_scales.reshape(len(rows), -1))
        if part_mins is not None:
            mins.append(part_mins.reshape(len(rows), -1))
    quants = quants if bits == 4 else quants.view(torch.int8)
    return _narrowed(bits, quants, torch.cat(scales), torch.cat(mins) if mins else None)


def _narrowed(bits: int, quants: Tensor, scales: Tensor, mins: Tensor | None) -> BlockWeight:
    """Keep scales in float16 if that is exact, and there is one for each block."""
    both = (scales,) if mins is None else (scales, mins)
    is_whole = scales.shape[1] * BLOCK == quants.shape[1]
    if is_whole and all(torch.equal(values.half().float(), values) for values in both):
        scales, mins = scales.half(), None if mins is None else mins.half()
    return BlockWeight(bits, quants, scales, mins)


def _float16_at(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at one byte offset of each block: [n, 1] float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _put_planes(packed: Tensor, bits: int, out: Tensor) -> None:
    """Unpack some bits of each byte, the lowest first.

    Args:
        packed: [n, ..., b] uint8, b a multiple of 8.
        bits: 1, 2 or 4.
        out: [n, ..., 8 b / bits] uint8, contiguous: all bytes' lowest bits, then their next ones.
    """
    # Eight bytes at a time, which a copy aligns.
    words = packed.clone(memory_format=torch.contiguous_format).view(torch.int64)
    planes = out.view(torch.int64).view(*words.shape[:-1], 8 // bits, words.shape[-1])
    mask = 0x0101010101010101 * ((1 << bits) - 1)
    for index in range(8 // bits):
        moved = words >> bits * index if index else words
        torch.bitwise_and(moved, mask, out=planes[..., index, :])


def _put_five_bits(packed: Tensor, high_bits: Tensor, out: Tensor) -> None:
    """Join packed half bytes [n, 16] and fifth bits [n, 4] in out [n, 32] uint8."""
    _put_planes(packed, 4, out)
    # A byte of fifth bits -> eight bytes, 16 where a bit is set.
    byte, bit = torch.arange(256, device=out.device), torch.arange(8, device=out.device)
    table = ((byte[:, None] >> bit & 1) << 4).to(torch.uint8).view(torch.int64).view(-1)
    fifth = table.index_select(0, high_bits.reshape(-1).int())
    out.view(torch.int64).bitwise_or_(fifth.view(-1, 4))


def _q4_0(blocks: Tensor, out: Tensor) -> Scales:
    scales = _float16_at(blocks, 0)
    _put_planes(blocks[:, 2:], 4, out)
    return scales, -8 * scales


def _q4_1(blocks: Tensor, out: Tensor) -> Scales:
    _put_planes(blocks[:, 4:], 4, out)
    return _float16_at(blocks, 0), _float16_at(blocks, 2)


def _q5_0(blocks: Tensor, out: Tensor) -> Scales:
    _put_five_bits(blocks[:, 6:], blocks[:, 2:6], out)
    out -= 16
    return _float16_at(blocks, 0), None


def _q5_1(blocks: Tensor, out: Tensor) -> Scales:
    _put_five_bits(blocks[:, 8:], blocks[:, 4:8], out)
    return _float16_at(blocks, 0), _float16_at(blocks, 2)


def _q8_0(blocks: Tensor, out: Tensor) -> Scales:
    out.copy_(blocks[:, 2:])
    return _float16_at(blocks, 0), None


def _q4_k(blocks: Tensor, out: Tensor) -> Scales:
    _put_nibbles_of_64(blocks[:, 16:], out)
    return _scales_and_mins(blocks)


def _q5_k(blocks: Tensor, out: Tensor) -> Scales:
    _put_nibbles_of_64(blocks[:, 48:], out)
    # Bit i of a byte of h is the fifth bit of a number of the i-th 32.
    fifth = torch.empty_like(out)
    _put_planes(blocks[:, 16:48], 1, fifth)
    out |= fifth << 4
    return _scales_and_mins(blocks)


def _q6_k(blocks: Tensor, out: Tensor) -> Scales:
    # Twice 128 numbers: low halves of 64 bytes, then their high halves; two more bits each in 32 bytes.
    _put_planes(blocks[:, :128].unflatten(1, (2, 64)), 4, out)
    high = torch.empty_like(out)
    _put_planes(blocks[:, 128:192].unflatten(1, (2, BLOCK)), 2, high)
    out |= high << 4
    out -= 32
    return blocks[:, 192:208].view(torch.int8).float() * _float16_at(blocks, 208), None


def _put_nibbles_of_64(packed: Tensor, out: Tensor) -> None:
    """Unpack [n, 128] uint8 to [n, 256]: the low halves of 32 bytes, then their high halves."""
    _put_planes(packed.unflatten(1, (4, BLOCK)), 4, out)


def _scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return [n, 8] scales and minimums of a Q4_K or Q5_K.

    12 bytes:   0-3  scales 0-3, high bits: top of scales 4-7
                4-7  mins 0-3, high bits: top of mins 4-7
                8-11 low halves: scales 4-7; high halves: mins 4-7
    """
    first, second, third = (blocks[:, start : start + 4] for start in (4, 8, 12))
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    mins = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)
    return scales * _float16_at(blocks, 0), mins * -_float16_at(blocks, 2)


# Bits and whether there are minimums, of those that are laid out as StoredBlocks says.
_AS_STORED = MappingProxyType({"Q4_1": (4, True), "Q8_0": (8, False), MXFP4.form: (4, False)})
# Bits of an integer, and what unpacks blocks [n, bytes] into integers [n, 32 or 256], a byte each.
_TYPES: Mapping[str, tuple[int, Callable[[Tensor, Tensor], Scales]]] = MappingProxyType(
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
