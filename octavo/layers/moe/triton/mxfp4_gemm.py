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
from octavo.layers.moe.tiling import PackedTiling
from octavo.layers.moe.triton.combine import combine_rows
from octavo.layers.moe.triton.mxfp4 import SPAN, unpacked
from octavo.layers.moe.triton.sort import SortedPairs
from octavo.layers.triton.activation import gate_and_up


def grouped_gemm(
    x: Tensor,
    weight: Mxfp4ExpertWeight,
    by_expert: SortedPairs,
    activation: str | None,
    tiling: PackedTiling,
) -> Tensor:
    """Multiply each pair's row with the weight of its expert; see grouped.grouped_gemm."""
    pairs, starts, num_chosen, num_slots = by_expert
    grid = num_slots, weight.shape[0]
    return _launch(x, weight, grid, len(pairs), (pairs, starts, num_chosen), activation, tiling)


def few_gate_up(
    x: Tensor, weight: Mxfp4ExpertWeight, experts: Tensor, activation: str, tiling: PackedTiling
) -> Tensor:
    """Return the activation of every pair's gate and up; see few.few_gate_up."""
    num_pairs = experts.numel()
    return _launch(x, weight, (1, num_pairs), num_pairs, (None, experts, experts.shape[1]), activation, tiling)


def few_down(
    x: Tensor, weight: Mxfp4ExpertWeight, choice: Choice, residual: Tensor | None, tiling: PackedTiling
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
    tiling: PackedTiling,
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
        *(pairs[2], size, activation, tiling.rows, tiling.columns, tiling.num_stages),
        num_warps=tiling.num_warps,
        **overlap_options(x),
    )
    return out


@triton.jit(do_not_specialize=["num_slots"])
def _mxfp4_kernel(
    x_ptr, words_ptr, exponents_ptr, bias_ptr, out_ptr, pairs_ptr, starts_ptr,
    num_columns, stride_x, num_slots, NUM_CHOSEN: tl.constexpr, SIZE: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of columns, slots, E), or (tiles of columns, 1, pairs) without pairs_ptr.

    With an activation x has tokens' rows, else pairs' rows; the first half of a program's rows of the weight
    is gate then, the other one up.
    """
    SPANS: tl.constexpr = (SIZE + SPAN - 1) // SPAN
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    OWN: tl.constexpr = COLUMNS // HALVES
    start_next(OVERLAP)
    num_weight_rows = num_columns * HALVES
    index = tl.arange(0, COLUMNS)
    # Columns past the end repeat the last one and are not stored.
    weight_row = tl.minimum(tl.program_id(0) * OWN + index % OWN, num_columns - 1)
    weight_row += index // OWN * num_columns
    k = tl.arange(0, SPAN)
    wait_for_previous(OVERLAP)
    if pairs_ptr is None:
        first = tl.program_id(2)
        end = first + 1
        expert = tl.load(starts_ptr + first).to(tl.int64)
    else:
        expert = tl.program_id(2).to(tl.int64)
        first = tl.load(starts_ptr + expert) + tl.program_id(1) * ROWS
        end = tl.load(starts_ptr + expert + 1)
    exponents_at = exponents_ptr + expert * SPANS * num_weight_rows + weight_row
    words_at = words_ptr + expert * SPANS * num_weight_rows * 16
    words_at += weight_row[:, None] * 16 + tl.arange(0, 16)[None, :]
    for tile in range(first, end, num_slots * ROWS):
        place = tile + tl.arange(0, ROWS)
        is_row = place < end
        pair = place.to(tl.int64)
        if pairs_ptr is not None:
            pair = tl.load(pairs_ptr + place, mask=is_row, other=0).to(tl.int64)
        x_row = place.to(tl.int64) if ACTIVATION is None else pair // NUM_CHOSEN
        x_at = x_ptr + x_row[:, None] * stride_x + k[None, :]
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        for span in tl.range(0, SPANS, num_stages=STAGES):
            words = tl.load(words_at + span * num_weight_rows * 16)
            exponents = tl.load(exponents_at + span * num_weight_rows)
            is_k = span * SPAN + k < SIZE
            x = tl.load(x_at + span * SPAN, mask=is_row[:, None] & is_k[None, :], other=0.0)
            total = tl.dot(unpacked(words, exponents, x.dtype), tl.trans(x), total, input_precision="ieee")
        if bias_ptr is not None:
            total += tl.load(bias_ptr + expert * num_weight_rows + weight_row).to(tl.float32)[:, None]
        if HALVES == 2:
            gate, up = tl.split(tl.permute(tl.reshape(total, [2, OWN, ROWS]), (1, 2, 0)))
            total = gate_and_up(gate, up, ACTIVATION)
        column = tl.program_id(0) * OWN + tl.arange(0, OWN)
        out_row = pair if ACTIVATION is None else place.to(tl.int64)
        out_at = out_ptr + out_row[:, None] * num_columns + column[None, :]
        inside = is_row[:, None] & (column < num_columns)[None, :]
        tl.store(out_at, tl.trans(total).to(out_ptr.dtype.element_ty), mask=inside)
