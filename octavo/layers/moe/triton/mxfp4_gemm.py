"""GEMMs over MXFP4 experts; imported only where Triton runs.

    programs     (tile of columns, slot, expert), as in grouped; or (tile of columns, 1, pair)
    a program    reads its tile of a weight once per tile of rows, a span of columns at a time

Words come by asynchronous copies, and become numbers in the registers that tensor cores read. One to four
tokens mostly choose different experts: then there is nothing to sort, and a tile has one row.
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo.gpu.launch import launch, overlap_options, start_next, wait_for_previous
from octavo.layers.moe.mxfp4_weight import Mxfp4ExpertWeight
from octavo.layers.moe.router import Choice
from octavo.layers.moe.tiling import Mxfp4Tiling
from octavo.layers.moe.triton.combine import combine_rows
from octavo.layers.moe.triton.mxfp4 import SPAN, unpacked
from octavo.layers.moe.triton.sort import SortedPairs
from octavo.layers.triton.activation import gate_and_up


def grouped_gemm(
    x: Tensor,
    weight: Mxfp4ExpertWeight,
    by_expert: SortedPairs,
    activation: str | None,
    tiling: Mxfp4Tiling,
) -> Tensor:
    """Multiply each pair's row with the weight of its expert; see grouped.grouped_gemm."""
    pairs, starts, num_chosen, num_slots = by_expert
    grid = num_slots, weight.shape[0]
    return _launch(x, weight, grid, len(pairs), (pairs, starts, num_chosen), activation, tiling)


def few_gate_up(
    x: Tensor, weight: Mxfp4ExpertWeight, experts: Tensor, activation: str, tiling: Mxfp4Tiling
) -> Tensor:
    """Return the activation of every pair's gate and up; see few.few_gate_up."""
    num_pairs = experts.numel()
    return _launch(
        x, weight, (1, num_pairs), num_pairs, (None, experts, experts.shape[1]), activation, tiling
    )


def few_down(
    x: Tensor, weight: Mxfp4ExpertWeight, choice: Choice, residual: Tensor | None, tiling: Mxfp4Tiling
) -> Tensor:
    """Return the sums of each token's products times its weights; see few.few_down."""
    rows = _launch(x, weight, (1, len(x)), len(x), (None, choice.experts, 1), None, tiling)
    return combine_rows(rows, choice.weights, residual)


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
    _, num_weight_rows, size = weight.shape
    halves = 1 if activation is None else 2
    num_columns = num_weight_rows // halves
    out = x.new_empty(num_pairs, num_columns)
    launch(
        _mxfp4_kernel,
        (-(-num_columns // (tiling.columns // halves)), *grid),
        *(x, weight.words, weight.exponents, weight.bias, out, *pairs[:2], num_columns, x.stride(0), grid[0]),
        *(pairs[2], size, activation, tiling.rows, tiling.columns, tiling.parts, tiling.num_stages),
        num_warps=tiling.num_warps,
        **overlap_options(x),
    )
    return out


@triton.jit
def _add_product(total, weight, x, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the products of parts of K, weight [P C, SPAN] and x [P R, SPAN], to [C, R], or to [P, C, R]."""
    if PARTS == 1:
        return tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    else:
        weight = tl.reshape(weight, [PARTS, COLUMNS, SPAN])
        x = tl.permute(tl.reshape(x, [PARTS, x.shape[0] // PARTS, SPAN]), (0, 2, 1))
        return tl.dot(weight, x, total, input_precision="ieee")


@triton.jit(do_not_specialize=["num_slots"])
def _mxfp4_kernel(
    x_ptr, words_ptr, exponents_ptr, bias_ptr, out_ptr, pairs_ptr, starts_ptr,
    num_columns, stride_x, num_slots, NUM_CHOSEN: tl.constexpr, SIZE: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of columns, slots, E), or (tiles of columns, 1, pairs) without pairs_ptr.

    With an activation x has tokens' rows, else pairs' rows; the first half of a program's rows of the weight
    is gate then, the other one up. PARTS spans are multiplied at a time: by a warp each, unless there is one.
    """
    SPANS: tl.constexpr = (SIZE + SPAN - 1) // SPAN
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    OWN: tl.constexpr = COLUMNS // HALVES
    start_next(OVERLAP)
    num_weight_rows = num_columns * HALVES
    index = tl.arange(0, PARTS * COLUMNS)
    own = index % COLUMNS
    # Columns past the end repeat the last one and are not stored.
    weight_row = tl.minimum(tl.program_id(0) * OWN + own % OWN, num_columns - 1) + own // OWN * num_columns
    row_in_spans = index // COLUMNS * num_weight_rows + weight_row
    word = tl.arange(0, 16)
    row = tl.arange(0, PARTS * ROWS)
    k = row[:, None] // ROWS * SPAN + tl.arange(0, SPAN)[None, :]
    wait_for_previous(OVERLAP)
    if pairs_ptr is None:
        first = tl.program_id(2)
        end = first + 1
        expert = tl.load(starts_ptr + first).to(tl.int64)
    else:
        expert = tl.program_id(2).to(tl.int64)
        first = tl.load(starts_ptr + expert) + tl.program_id(1) * ROWS
        end = tl.load(starts_ptr + expert + 1)
    exponents_at = exponents_ptr + expert * SPANS * num_weight_rows + row_in_spans
    words_at = words_ptr + expert * SPANS * num_weight_rows * 16 + row_in_spans[:, None] * 16 + word[None, :]
    for tile in range(first, end, num_slots * ROWS):
        x_row = tile + row % ROWS
        is_row = (x_row < end)[:, None]
        if ACTIVATION is not None:
            if pairs_ptr is not None:
                x_row = tl.load(pairs_ptr + x_row, mask=x_row < end, other=0)
            x_row //= NUM_CHOSEN
        x_at = x_ptr + x_row.to(tl.int64)[:, None] * stride_x + k
        total = tl.zeros([COLUMNS, ROWS] if PARTS == 1 else [PARTS, COLUMNS, ROWS], tl.float32)
        for span in tl.range(0, SPANS, PARTS, num_stages=STAGES):
            if SPANS % PARTS == 0:
                words = tl.load(words_at + span * num_weight_rows * 16)
                exponents = tl.load(exponents_at + span * num_weight_rows)
            else:
                is_span = span + index // COLUMNS < SPANS
                words = tl.load(words_at + span * num_weight_rows * 16, mask=is_span[:, None], other=0)
                exponents = tl.load(exponents_at + span * num_weight_rows, mask=is_span, other=0)
            x = tl.load(x_at + span * SPAN, mask=is_row & (span * SPAN + k < SIZE), other=0.0)
            total = _add_product(total, unpacked(words, exponents, x.dtype), x, PARTS, COLUMNS)
        if PARTS > 1:
            total = tl.sum(total, axis=0)
        if bias_ptr is not None:
            own_row = tl.arange(0, COLUMNS)
            own_row = tl.minimum(tl.program_id(0) * OWN + own_row % OWN, num_columns - 1) + own_row // OWN * num_columns
            total += tl.load(bias_ptr + expert * num_weight_rows + own_row).to(tl.float32)[:, None]
        if HALVES == 2:
            gate, up = tl.split(tl.permute(tl.reshape(total, [2, OWN, ROWS]), (1, 2, 0)))
            total = gate_and_up(gate, up, ACTIVATION)
        out_row = tile + tl.arange(0, ROWS)
        is_out = out_row < end
        if ACTIVATION is None and pairs_ptr is not None:
            out_row = tl.load(pairs_ptr + out_row, mask=is_out, other=0)
        column = tl.program_id(0) * OWN + tl.arange(0, OWN)
        out_at = out_ptr + out_row.to(tl.int64)[:, None] * num_columns + column[None, :]
        inside = is_out[:, None] & (column < num_columns)[None, :]
        tl.store(out_at, tl.trans(total).to(out_ptr.dtype.element_ty), mask=inside)
