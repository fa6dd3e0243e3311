"""GEMMs over MXFP4 experts; imported only where Triton runs.

    programs     (tile of columns, slot, expert), as in grouped; or (tile of columns, 1, pair)
    a program    reads its tile of a weight once per tile of rows, a span of columns at a time

Words come by asynchronous copies, and become numbers in the registers that tensor cores read. One to four
tokens mostly choose different experts: then there is nothing to sort, and a tile has one row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.forms.mxfp4_experts import Mxfp4ExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.portable.experts.combine import combine_rows
from octavo.gemm.portable.experts.expert_tile import store_tile, tile_weight_rows
from octavo.gemm.portable.experts.expert_tiling import FLOAT32_MXFP4_TILING, Mxfp4Tiling
from octavo.gemm.portable.experts.mxfp4_words import SPAN, unpacked
from octavo.gemm.portable.experts.sort_pairs import SortedPairs
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous


def grouped_gemm(
    x: Tensor,
    weight: Mxfp4ExpertWeight,
    by_expert: SortedPairs,
    activation: str | None,
    tiling: Mxfp4Tiling,
) -> Tensor:
    """Multiply each pair's row with the weight of its expert; see grouped.grouped_gemm.

    Rows in float32 have a tiling of their own.
    """
    pairs, starts, num_chosen, num_slots = by_expert
    if x.dtype == torch.float32:
        tiling = FLOAT32_MXFP4_TILING
    grid = num_slots, weight.shape[0]
    return _launch(x, weight, grid, len(pairs), (pairs, starts, num_chosen), activation, tiling)


def few_gate_up(
    x: Tensor,
    weight: Mxfp4ExpertWeight,
    experts: Tensor,
    activation: str,
    tiling: Mxfp4Tiling,
) -> Tensor:
    """Return the activation of every pair's gate and up; see pairs.few_gate_up."""
    num_pairs = experts.numel()
    pairs = None, experts, experts.shape[1]
    return _launch(x, weight, (1, num_pairs), num_pairs, pairs, activation, tiling)


def few_down(
    x: Tensor,
    weight: Mxfp4ExpertWeight,
    choice: Choice,
    residual: Tensor | None,
    tiling: Mxfp4Tiling,
) -> Tensor:
    """Return the sums of each token's products times its weights; see few.few_down."""
    rows = _launch(x, weight, (1, len(x)), len(x), (None, choice.experts, 1), None, tiling)
    return combine_rows(rows, choice, residual, num_held=weight.shape[0])


def _launch(
    x: Tensor,
    weight: Mxfp4ExpertWeight,
    grid: tuple[int, int],
    num_pairs: int,
    pairs: tuple[Tensor | None, Tensor, int],
    activation: str | None,
    tiling: Mxfp4Tiling,
) -> Tensor:
    """Return every pair's row; pairs are sorted ones, or None and each pair's expert, and k."""
    num_experts, num_weight_rows, size = weight.shape
    halves = 1 if activation is None else 2
    num_columns = num_weight_rows // halves
    out = x.new_empty(num_pairs, num_columns)
    launch(
        _mxfp4_kernel,
        (-(-num_columns // (tiling.columns // halves)), *grid),
        x,
        weight.words,
        weight.exponents,
        weight.bias,
        out,
        *pairs[:2],
        num_columns,
        x.stride(0),
        grid[0],
        pairs[2],
        size,
        activation,
        tiling.rows,
        tiling.columns,
        tiling.parts,
        tiling.num_stages,
        num_experts,
        num_warps=tiling.num_warps,
        maxnreg=tiling.registers,
        **overlap_options(x),
    )
    return out


@triton.jit
def _load_span(at, first, part, SPANS: tl.constexpr, PARTS: tl.constexpr):
    """Load what parts of K have from a span on; beyond the last one it is 0."""
    if SPANS % PARTS == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=first + part < SPANS, other=0)


@triton.jit
def _add_product(total, weight, x, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the products of parts of K, weight [P C, SPAN] and x [P R, SPAN], to [C, R], or to [P, C, R]."""
    if PARTS == 1:
        return tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    else:
        weight = tl.reshape(weight, [PARTS, COLUMNS, SPAN])
        x = tl.permute(tl.reshape(x, [PARTS, x.shape[0] // PARTS, SPAN]), (0, 2, 1))
        return tl.dot(weight, x, total, input_precision="ieee")


@triton.jit
def _sum_spans(
    x_at, is_row, words_at, exponents_at, num_weight_rows, SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the products of an expert's tile and a tile of rows, [COLUMNS, ROWS] float32."""
    SPANS: tl.constexpr = (SIZE + SPAN - 1) // SPAN
    part = tl.arange(0, PARTS * COLUMNS) // COLUMNS
    k = (tl.arange(0, PARTS * ROWS) // ROWS * SPAN)[:, None] + tl.arange(0, SPAN)[None, :]
    words_at += (part * num_weight_rows * 16)[:, None] + tl.arange(0, 16)[None, :]
    exponents_at += part * num_weight_rows
    total = tl.zeros([COLUMNS, ROWS] if PARTS == 1 else [PARTS, COLUMNS, ROWS], tl.float32)
    for span in tl.range(0, SPANS, PARTS, num_stages=STAGES):
        words = _load_span(words_at + span * num_weight_rows * 16, span, part[:, None], SPANS, PARTS)
        exponents = _load_span(exponents_at + span * num_weight_rows, span, part, SPANS, PARTS)
        x = tl.load(x_at + k + span * SPAN, mask=is_row & (span * SPAN + k < SIZE), other=0.0)
        total = _add_product(total, unpacked(words, exponents, x.dtype), x, PARTS, COLUMNS)
    return total if PARTS == 1 else tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["num_slots"])
def _mxfp4_kernel(
    x_ptr, words_ptr, exponents_ptr, bias_ptr, out_ptr, pairs_ptr, starts_ptr,
    num_columns, stride_x, num_slots,
    NUM_CHOSEN: tl.constexpr, SIZE: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    NUM_HELD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of columns, slots, E), or (tiles of columns, 1, pairs) without pairs_ptr.

    With an activation x has tokens' rows, else pairs' rows; the first half of a program's rows of the weight
    is gate then, the other one up.
    """
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    OWN: tl.constexpr = COLUMNS // HALVES
    start_next(OVERLAP)
    num_weight_rows = num_columns * HALVES
    weight_row = tile_weight_rows(tl.arange(0, PARTS * COLUMNS) % COLUMNS, num_columns, COLUMNS, HALVES)
    wait_for_previous(OVERLAP)
    if pairs_ptr is None:
        first = tl.program_id(2)
        end = first + 1
        expert = tl.load(starts_ptr + first).to(tl.int64)
        end = tl.where(expert < NUM_HELD, end, first)
    else:
        expert = tl.program_id(2).to(tl.int64)
        first = tl.load(starts_ptr + expert) + tl.program_id(1) * ROWS
        end = tl.load(starts_ptr + expert + 1)
    first_row = expert * ((SIZE + SPAN - 1) // SPAN) * num_weight_rows
    words_at = words_ptr + first_row * 16 + weight_row[:, None] * 16
    for tile in range(first, end, num_slots * ROWS):
        x_row = tile + tl.arange(0, PARTS * ROWS) % ROWS
        is_row = (x_row < end)[:, None]
        if ACTIVATION is not None:
            if pairs_ptr is not None:
                x_row = tl.load(pairs_ptr + x_row, mask=x_row < end, other=0)
            x_row //= NUM_CHOSEN
        total = _sum_spans(
            x_ptr + x_row.to(tl.int64)[:, None] * stride_x, is_row,
            words_at, exponents_ptr + first_row + weight_row, num_weight_rows,
            SIZE, ROWS, COLUMNS, PARTS, STAGES,
        )  # fmt: skip
        column = tl.program_id(0) * OWN + tl.arange(0, OWN)
        bias_row = expert * num_weight_rows + tl.minimum(column, num_columns - 1)
        up_total = total
        if HALVES == 2:
            total, up_total = tl.split(tl.permute(tl.reshape(total, [2, OWN, ROWS]), (1, 2, 0)))
        out_row = tile + tl.arange(0, ROWS)
        is_out = out_row < end
        if ACTIVATION is None and pairs_ptr is not None:
            out_row = tl.load(pairs_ptr + out_row, mask=is_out, other=0)
        store_tile(
            total, up_total, bias_ptr, bias_row, out_ptr, out_row, is_out, column, num_columns, ACTIVATION
        )
