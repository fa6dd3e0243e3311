"""Dequantises a packed weight, for GEMMs with many rows; imported only where Triton runs."""

import triton
import triton.language as tl
from torch import Tensor

from octavo.forms.packed import PLANE, PackedWeight
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous

_ROWS = 16
_NUM_WARPS = 4


def dequantise(weight: PackedWeight, like: Tensor) -> Tensor:
    """Return the weight, a new [N, K] of the dtype of `like`; columns in the order they are stored in."""
    num_rows, size = weight.shape
    out = like.new_empty(num_rows, size)
    num_spans = weight.words.shape[1] // PLANE
    launch(
        _dequantise_kernel,
        (-(-num_rows // _ROWS), num_spans),
        words_ptr=weight.words,
        pairs_ptr=weight.pairs,
        out_ptr=out,
        num_rows=num_rows,
        size=size,
        num_spans=num_spans,
        factor=weight.factor,
        BITS=weight.bits,
        GROUP=weight.group,
        ROWS=_ROWS,
        num_warps=_NUM_WARPS,
        **overlap_options(like),
    )
    return out


@triton.jit
def halves_of(pair):
    """Return the scale and the minimum of a word, in float32."""
    scale = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    low = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, low


@triton.jit
def read_pair(pair, BITS: tl.constexpr):
    """Return the factor and the summand that `scaled` takes, from words of scales and minimums."""
    STEPS: tl.constexpr = 1 << BITS
    # What `scaled` reads for q = 0.
    ORIGIN: tl.constexpr = STEPS + (128 if BITS == 8 else 0)
    scale, low = halves_of(pair)
    return scale * STEPS, low - scale * ORIGIN


@triton.jit
def scaled(words, plane: tl.constexpr, scale, low, BITS: tl.constexpr):
    """Return a plane's weights in float32: 1 + q / 2^BITS, put together of bits, times scale, plus low."""
    AT: tl.constexpr = 23 - BITS
    SHIFT: tl.constexpr = plane * BITS
    moved = words >> (SHIFT - AT) if SHIFT > AT else words << (AT - SHIFT)
    mantissa = moved & (((1 << BITS) - 1) << AT)
    if BITS == 8:
        # q + 128 has no sign.
        mantissa = mantissa ^ 0x400000
    return (mantissa | 0x3F800000).to(tl.float32, bitcast=True) * scale + low


@triton.jit(do_not_specialize=["num_rows", "factor"])
def _dequantise_kernel(
    words_ptr, pairs_ptr, out_ptr, num_rows, size, num_spans, factor,
    BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(num_rows / ROWS), num_spans)."""
    SPAN: tl.constexpr = 32 * 32 // BITS
    start_next(OVERLAP)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    span = tl.program_id(1)
    j = tl.arange(0, 32)[None, :]
    is_row = row < num_rows
    words_at = words_ptr + row.to(tl.int64) * (num_spans * 32) + span * 32 + j
    words = tl.load(words_at, mask=is_row, other=0)
    # The memory that is written may still be read by the kernel before.
    wait_for_previous(OVERLAP)
    out_at = out_ptr + row.to(tl.int64) * size
    for plane in tl.static_range(32 // BITS):
        k = span * SPAN + plane * 32 + j
        # Where a group is half a plane, each half has its own pair.
        group = k // GROUP if GROUP < 32 else (span * SPAN + plane * 32) // GROUP
        pair = tl.load(pairs_ptr + group * num_rows + row, mask=is_row, other=0)
        scale, low = read_pair(pair, BITS)
        values = scaled(words, plane, scale, low, BITS) * factor
        tl.store(out_at + k, values.to(out_ptr.dtype.element_ty), mask=is_row & (k < size))
