"""The grouped GEMM: rows by expert, each times its expert's weight; imported only where Triton runs.

    programs     (tile of columns, slot, expert)
    a program    reads its tile of the expert's weight once per tile of rows: slot, slot + slots, ...

Few rows per expert, as in decoding, make one tile of rows, so that every touched expert is read once and the
others not at all. The number of programs does not depend on which experts those are: nothing waits for the
host. Tensor cores take the weight as their left operand, whose tiles are tall: 16 rows of x waste no lane.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.forms.float_experts import ExpertWeight
from octavo.gemm.portable.experts.expert_tile import rows_of_tile, store_tile
from octavo.gemm.portable.experts.expert_tiling import GroupedTiling
from octavo.gemm.portable.experts.sort_pairs import SortedPairs
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous


def grouped_gemm(
    x: Tensor,
    weight: ExpertWeight,
    by_expert: SortedPairs,
    activation: str | None,
    tiling: GroupedTiling,
    row_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply each pair's row with the weight of its expert; sums are float32.

    Args:
        x: [T, K], a row for each token, or [T k, K], a row for each pair as by_expert sorts them; bfloat16,
            float16 or float32, or float8 like the weight; rows any stride apart, last dimension contiguous.
        weight: [E, 2 n, K] = [gate | up] for rows of tokens, [E, H, K] for rows of pairs.
        by_expert: the pairs.
        activation: name of the gated activation for rows of tokens, see kernels.activation; None for
            rows of pairs.
        tiling: of a program.
        row_scales: of float8 rows, contiguous float32: by which they are to be multiplied.
        dtype: of the result; None: that of x.

    Returns:
        For rows of tokens, a new [T k, n]: activation(gate) * up of each pair as by_expert sorts them. For
        rows of pairs, a new [T k, H]: row p is that of pair p.
    """
    num_experts, num_weight_rows, size = weight.shape
    num_columns = num_weight_rows // (1 if activation is None else 2)
    out = x.new_empty(len(by_expert.pairs), num_columns, dtype=dtype)
    values, scales = weight.values, weight.scales
    launch(
        _grouped_kernel,
        (-(-num_columns // tiling.columns), by_expert.num_slots, num_experts),
        x_ptr=x,
        weight_ptr=values,
        weight_tiles=_tiles_of(values, tiling),
        scales_ptr=values if scales is None else scales,
        bias_ptr=weight.bias,
        row_scales_ptr=row_scales,
        out_ptr=out,
        pairs_ptr=by_expert.pairs,
        starts_ptr=by_expert.starts,
        num_columns=num_columns,
        stride_x=x.stride(0),
        num_slots=by_expert.num_slots,
        NUM_CHOSEN=by_expert.num_chosen,
        SIZE=size,
        ACTIVATION=activation,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        DEPTH=tiling.depth,
        STAGES=tiling.num_stages,
        TMA=tiling.tma,
        WIDTH=weight.width,
        num_warps=tiling.num_warps,
        **overlap_options(x),
    )
    return out


def _tiles_of(weight: Tensor, tiling: GroupedTiling) -> TensorDescriptor | None:
    """Describe the weights of all experts to TMA; what lies outside of them reads as zero."""
    if not tiling.tma:
        return None
    _, _, size = weight.shape
    return TensorDescriptor.from_tensor(weight.view(-1, size), [tiling.columns, tiling.depth])


@triton.jit
def _load_rows(x_at, is_row, start, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """Load [ROWS, DEPTH] of rows; what lies outside is 0."""
    if SIZE % DEPTH == 0:
        return tl.load(x_at + start, mask=is_row[:, None], other=0.0)
    else:
        is_k = start + tl.arange(0, DEPTH) < SIZE
        return tl.load(x_at + start, mask=is_row[:, None] & is_k[None, :], other=0.0)


@triton.jit
def _load_weight(
    tiles, first_row, weight_at, start, SIZE: tl.constexpr, DEPTH: tl.constexpr, TMA: tl.constexpr
):
    """Load [COLUMNS, DEPTH] of a weight; beyond K it is 0."""
    if TMA:
        return tiles.load([first_row, start])
    elif SIZE % DEPTH == 0:
        return tl.load(weight_at + start)
    else:
        is_k = start + tl.arange(0, DEPTH) < SIZE
        return tl.load(weight_at + start, mask=is_k[None, :], other=0.0)


@triton.jit
def _add_product(total, weight, x, scales_at, PARTS: tl.constexpr):
    """Return total [COLUMNS, ROWS] + weight x. A row's only scale is applied to its sum, later.

    Tensor cores do not add products of float8 in full float32: they only add up those of one step.
    """
    if PARTS == 1 and x.dtype == tl.float8e4nv:
        return total + tl.dot(weight, x)
    elif PARTS == 1:
        return tl.dot(weight.to(x.dtype), x, total, input_precision="ieee")
    else:
        scales = tl.load(scales_at)
        return total + tl.dot(weight.to(x.dtype), x, input_precision="ieee") * scales[:, None]


@triton.jit(do_not_specialize=["num_slots"])
def _grouped_kernel(
    x_ptr, weight_ptr, weight_tiles, scales_ptr, bias_ptr, row_scales_ptr, out_ptr,
    pairs_ptr, starts_ptr, num_columns, stride_x, num_slots,
    NUM_CHOSEN: tl.constexpr, SIZE: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    TMA: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of columns, slots, E). With an activation x has tokens' rows, else sorted pairs' rows.

    WIDTH numbers of a row of the weight share a scale; 0: there are none.
    """
    PARTS: tl.constexpr = 1 if WIDTH == 0 else (SIZE + WIDTH - 1) // WIDTH
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    start_next(OVERLAP)
    expert = tl.program_id(2)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    # Columns past the end repeat the last one, or are those of the next weight, and are not stored.
    weight_row = expert.to(tl.int64) * HALVES * num_columns + tl.minimum(column, num_columns - 1)
    weight_at = weight_ptr + weight_row[:, None] * SIZE + k[None, :]
    up_at = weight_at + num_columns.to(tl.int64) * SIZE
    scales_at = scales_ptr + expert.to(tl.int64) * PARTS * HALVES * num_columns
    scales_at += tl.minimum(column, num_columns - 1)
    first_row = expert * HALVES * num_columns + tl.program_id(0) * COLUMNS
    wait_for_previous(OVERLAP)
    first = tl.load(starts_ptr + expert) + tl.program_id(1) * ROWS
    end = tl.load(starts_ptr + expert + 1)
    for tile in range(first, end, num_slots * ROWS):
        is_row, x_row, out_row = rows_of_tile(pairs_ptr, tile, end, NUM_CHOSEN, ACTIVATION, ROWS)
        x_at = x_ptr + x_row[:, None] * stride_x + k[None, :]
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        up_total = total
        for start in tl.range(0, SIZE, DEPTH, num_stages=STAGES):
            x = tl.trans(_load_rows(x_at, is_row, start, SIZE, DEPTH))
            weight = _load_weight(weight_tiles, first_row, weight_at, start, SIZE, DEPTH, TMA)
            part_at = scales_at if PARTS == 1 else scales_at + start // WIDTH * HALVES * num_columns
            total = _add_product(total, weight, x, part_at, PARTS)
            if HALVES == 2:
                up = _load_weight(weight_tiles, first_row + num_columns, up_at, start, SIZE, DEPTH, TMA)
                up_total = _add_product(up_total, up, x, part_at + num_columns, PARTS)
        if WIDTH > 0 and PARTS == 1:
            total *= tl.load(scales_at)[:, None]
            if HALVES == 2:
                up_total *= tl.load(scales_at + num_columns)[:, None]
        if row_scales_ptr is not None:
            row_scale = tl.load(row_scales_ptr + x_row, mask=is_row, other=0.0)[None, :]
            total *= row_scale
            if HALVES == 2:
                up_total *= row_scale
        store_tile(
            total, up_total, bias_ptr, weight_row, out_ptr, out_row, is_row, column, num_columns, ACTIVATION
        )
