"""The grouped GEMM over packed experts; imported only where Triton runs.

As in `grouped`, a program has a tile of columns of an expert, and walks over the expert's tiles of rows. It
reads a span of words at a time; each plane of them, unpacked and scaled in registers, meets its 32 columns of
x.
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo.forms.packed_experts import PackedExpertWeight
from octavo.gemm.portable.experts.expert_tile import rows_of_tile
from octavo.gemm.portable.experts.expert_tiling import PackedTiling
from octavo.gemm.portable.experts.sort_pairs import SortedPairs
from octavo.gemm.portable.packed.dequantise import read_pair, scaled
from octavo.kernels.activation import activate
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous


def grouped_gemm(
    x: Tensor,
    weight: PackedExpertWeight,
    by_expert: SortedPairs,
    activation: str | None,
    tiling: PackedTiling,
) -> Tensor:
    """Multiply each pair's row with the weight of its expert; see grouped.grouped_gemm.

    x is bfloat16 or float16, and the activation is "silu", "gelu" or "gelu_tanh". A weight [gate | up] has a
    factor for each of the two.
    """
    num_experts, num_weight_rows, size = weight.shape
    halves = 1 if activation is None else 2
    num_columns = num_weight_rows // halves
    out = x.new_empty(len(by_expert.pairs), num_columns)
    order = weight.order
    launch(
        _packed_kernel,
        (-(-num_columns // (tiling.columns // halves)), by_expert.num_slots, num_experts),
        x_ptr=x,
        words_ptr=weight.words,
        pairs_ptr=weight.pairs,
        factors_ptr=weight.factors,
        order_ptr=by_expert.pairs if order is None else order,
        out_ptr=out,
        rows_ptr=by_expert.pairs,
        starts_ptr=by_expert.starts,
        num_columns=num_columns,
        stride_x=x.stride(0),
        num_slots=by_expert.num_slots,
        NUM_CHOSEN=by_expert.num_chosen,
        SIZE=size,
        BITS=weight.bits,
        GROUP=weight.group,
        ORDERED=order is not None,
        ACTIVATION=activation,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **overlap_options(x),
    )
    return out


@triton.constexpr_function
def _scale_asm(shift):
    """Return PTX for two numbers of 4 bits as bfloat16: q + 128, then q - 8, then that times $2 plus $3."""
    # 0xEA: (a and b) or c.
    return (
        f"{{ .reg .b32 bits, one, offset; shr.u32 bits, $1, {shift};"
        "lop3.b32 bits, bits, 0x000F000F, 0x43004300, 0xEA;"
        "mov.b32 one, 0x3F803F80; mov.b32 offset, 0xC308C308;"
        "fma.rn.bf16x2 bits, bits, one, offset; fma.rn.bf16x2 $0, bits, $2, $3; }"
    )


@triton.jit
def _values(words, PLANE: tl.constexpr, scale, low, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Return a plane of words [C, n] in a dtype, with what read_pair returned.

    4 bits become bfloat16 two at a time: then scales and minimums are rounded, too.
    """
    if BITS == 4 and DTYPE.is_bf16():
        half = (words if PLANE < 4 else words >> 16).to(tl.int16)
        step = scale / 16
        # The weight of q = 8: bfloat16 holds small steps from there well.
        middle = (low + scale + 8 * step).to(DTYPE)
        return tl.inline_asm_elementwise(
            _scale_asm(PLANE % 4 * 4),
            "=r,r,r,r",
            [half, tl.broadcast_to(step.to(DTYPE), half.shape), tl.broadcast_to(middle, half.shape)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return scaled(words, PLANE, scale, low, BITS).to(DTYPE)


@triton.jit
def _load_plane(x_at, order_ptr, is_row, start, SIZE: tl.constexpr, ORDERED: tl.constexpr):
    """Load 32 columns of rows of x, [32, ROWS], that meet a plane; beyond K and the rows they are 0."""
    k = start + tl.arange(0, 32)
    is_k = k < SIZE
    if ORDERED:
        k = tl.load(order_ptr + k, mask=is_k, other=0)
    return tl.load(x_at + k[:, None], mask=is_k[:, None] & is_row[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_slots"])
def _packed_kernel(
    x_ptr, words_ptr, pairs_ptr, factors_ptr, order_ptr, out_ptr,
    rows_ptr, starts_ptr, num_columns, stride_x, num_slots,
    NUM_CHOSEN: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ORDERED: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of columns, slots, E). With an activation x has tokens' rows, else sorted pairs' rows.

    With an activation, the first half of a program's rows of the weight is gate, the other one up.
    """
    SPAN: tl.constexpr = 32 * 32 // BITS
    NUM_SPANS: tl.constexpr = (SIZE + SPAN - 1) // SPAN
    NUM_GROUPS: tl.constexpr = NUM_SPANS * SPAN // GROUP
    PLANES: tl.constexpr = GROUP // 32 if GROUP > 32 else 1
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    OWN: tl.constexpr = COLUMNS // HALVES
    start_next(OVERLAP)
    expert = tl.program_id(2).to(tl.int64)
    num_weight_rows = num_columns * HALVES
    index = tl.arange(0, COLUMNS)
    j = tl.arange(0, 32)
    # Columns past the end repeat the last one and are not stored.
    weight_row = tl.minimum(tl.program_id(0) * OWN + index % OWN, num_columns - 1)
    weight_row += index // OWN * num_columns
    words_at = words_ptr + (expert * num_weight_rows + weight_row)[:, None] * (NUM_SPANS * 32) + j[None, :]
    pairs_at = pairs_ptr + expert * NUM_GROUPS * num_weight_rows + weight_row[:, None]
    factor = tl.load(factors_ptr + expert * HALVES + index // OWN)
    order_ptr += expert * SIZE
    wait_for_previous(OVERLAP)
    first = tl.load(starts_ptr + tl.program_id(2)) + tl.program_id(1) * ROWS
    end = tl.load(starts_ptr + tl.program_id(2) + 1)
    for tile in range(first, end, num_slots * ROWS):
        is_row, x_row, out_row = rows_of_tile(rows_ptr, tile, end, NUM_CHOSEN, ACTIVATION, ROWS)
        x_at = x_ptr + (x_row * stride_x)[None, :]
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
        for span in range(NUM_SPANS):
            words = tl.load(words_at + span * 32)
            for group in tl.static_range(SPAN // (GROUP if GROUP > 32 else 32)):
                k = span * SPAN + group * PLANES * 32
                of_group = ((k + j) // GROUP)[None, :] if GROUP < 32 else k // GROUP
                scale, low = read_pair(tl.load(pairs_at + of_group * num_weight_rows), BITS)
                for plane in tl.static_range(PLANES):
                    x = _load_plane(x_at, order_ptr, is_row, k + plane * 32, SIZE, ORDERED)
                    values = _values(words, group * PLANES + plane, scale, low, BITS, x.dtype)
                    sums = tl.dot(values, x, sums)
        sums *= factor[:, None]
        if ACTIVATION is not None:
            gate, up = tl.split(tl.permute(tl.reshape(sums, [2, OWN, ROWS]), (1, 2, 0)))
            sums = activate(gate, ACTIVATION) * up
        column = tl.program_id(0) * OWN + tl.arange(0, OWN)
        out_at = out_ptr + out_row.to(tl.int64)[None, :] * num_columns + column[:, None]
        inside = (column < num_columns)[:, None] & is_row[None, :]
        tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=inside)
