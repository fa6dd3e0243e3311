"""The grouped GEMM: rows by expert, each times its expert's weight; imported only where Triton runs.

    programs     (tile of columns, slot, expert); or (tile of columns, 1, pair of a token and an expert)
    a program    reads its tile of the expert's weight once per tile of rows: slot, slot + slots, ...

If an expert has a small number of rows, as in decoding, all of them fit one tile: every chosen expert is read
once and the others not at all. The number of programs does not depend on which experts those are, so nothing
waits for the host. Tensor cores take the weight as their left operand, whose tiles are tall: 16 rows of x
waste no lane. One to four tokens mostly choose different experts: then each pair has programs of its own, and
nothing is sorted.

The forms of weights differ in how a tile becomes the left operand:

    floats         values by TMA or asynchronous copies, perhaps times scales          float_tiles
    mxfp4          words by asynchronous copies, unpacked in registers                 mxfp4_tiles
    packed         words, unpacked and scaled in registers                             packed_tiles
    packed pair    words, unpacked; the sums of each group are scaled, for one row     packed_tiles
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.forms.mxfp4_experts import Mxfp4ExpertWeight
from octavo.forms.packed_experts import PackedExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.portable.experts.combine import combine_rows
from octavo.gemm.portable.experts.expert_tiling import (
    FLOAT32_MXFP4_TILING,
    AnyExpertWeight,
    GroupedTiling,
    Mxfp4Tiling,
    PackedTiling,
)
from octavo.gemm.portable.experts.float_tiles import describe_weight, place_floats, sum_floats
from octavo.gemm.portable.experts.mxfp4_tiles import place_mxfp4, sum_mxfp4
from octavo.gemm.portable.experts.packed_tiles import place_packed, place_pair, sum_packed, sum_pair
from octavo.gemm.portable.experts.sort_pairs import SortedPairs
from octavo.kernels.activation import gate_and_up
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous

AnyTiling = GroupedTiling | Mxfp4Tiling | PackedTiling


def grouped_gemm(
    x: Tensor,
    weight: AnyExpertWeight,
    by_expert: SortedPairs,
    activation: str | None,
    tiling: AnyTiling,
    row_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply each pair's row with the weight of its expert; sums are float32.

    Args:
        x: [T, K], a row for each token, or [T k, K], a row for each pair as by_expert sorts them; bfloat16,
            float16 or, except with packed weights, float32; or float8 like the weight. Rows any stride
            apart, last dimension contiguous.
        weight: [E, 2 n, K] = [gate | up] for rows of tokens, [E, H, K] for rows of pairs. A packed
            [gate | up] has a factor for each of the two.
        by_expert: the pairs.
        activation: name of the gated activation for rows of tokens, see kernels.activation; None for
            rows of pairs.
        tiling: of a program; with weights in MXFP4, rows in float32 have one of their own.
        row_scales: by which rows in float8 are to be multiplied, contiguous float32.
        dtype: of the result; None: that of x.

    Returns:
        For rows of tokens, a new [T k, n]: activation(gate) * up of each pair as by_expert sorts them. For
        rows of pairs, a new [T k, H]: row p is that of pair p.
    """
    if isinstance(weight, Mxfp4ExpertWeight) and x.dtype == torch.float32:
        tiling = FLOAT32_MXFP4_TILING
    num_slots, num_experts = by_expert.num_slots, weight.shape[0]
    return _launch(
        x,
        weight,
        activation,
        tiling,
        grid=(num_slots, num_experts),
        num_pairs=len(by_expert.pairs),
        dtype=dtype,
        pairs_ptr=by_expert.pairs,
        starts_ptr=by_expert.starts,
        row_scales_ptr=row_scales,
        NUM_CHOSEN=by_expert.num_chosen,
    )


def pair_gate_up(
    x: Tensor,
    weight: Mxfp4ExpertWeight | PackedExpertWeight,
    experts: Tensor,
    activation: str,
    tiling: AnyTiling,
) -> Tensor:
    """Return the activation of every pair's gate and up; see pair_gemv.pair_gate_up."""
    return _launch_pairs(x, weight, experts, experts.shape[1], activation, tiling)


def pair_down(
    x: Tensor,
    weight: Mxfp4ExpertWeight | PackedExpertWeight,
    choice: Choice,
    residual: Tensor | None,
    tiling: AnyTiling,
) -> Tensor:
    """Return the sums of each token's products times its weights; see pair_gemv.pair_down."""
    rows = _launch_pairs(x, weight, choice.experts, 1, None, tiling)
    return combine_rows(rows, choice, residual, num_held=weight.shape[0])


def _launch_pairs(
    x: Tensor,
    weight: Mxfp4ExpertWeight | PackedExpertWeight,
    experts: Tensor,
    num_chosen: int,
    activation: str | None,
    tiling: AnyTiling,
) -> Tensor:
    """Return every pair's row, by programs of its own; x has a row for num_chosen pairs."""
    num_pairs = experts.numel()
    return _launch(
        x,
        weight,
        activation,
        tiling,
        grid=(1, num_pairs),
        num_pairs=num_pairs,
        dtype=None,
        pairs_ptr=None,
        starts_ptr=experts,
        row_scales_ptr=None,
        NUM_CHOSEN=num_chosen,
    )


def _launch(
    x: Tensor,
    weight: AnyExpertWeight,
    activation: str | None,
    tiling: AnyTiling,
    *,
    grid: tuple[int, int],
    num_pairs: int,
    dtype: torch.dtype | None,
    **arguments: Any,
) -> Tensor:
    """Return every pair's row. `arguments` are the kernel's own that say which pairs there are."""
    num_experts, num_weight_rows, size = weight.shape
    halves = 1 if activation is None else 2
    num_columns = num_weight_rows // halves
    out = x.new_empty(num_pairs, num_columns, dtype=dtype)
    # The tilings of floats count columns of the result.
    columns = tiling.columns * halves if isinstance(tiling, GroupedTiling) else tiling.columns
    launch(
        _grouped_kernel,
        (-(-num_columns // (columns // halves)), *grid),
        x_ptr=x,
        out_ptr=out,
        num_columns=num_columns,
        stride_x=x.stride(0),
        num_slots=grid[0],
        SIZE=size,
        ACTIVATION=activation,
        ROWS=tiling.rows,
        COLUMNS=columns,
        STAGES=tiling.num_stages,
        NUM_HELD=num_experts,
        **_operands(weight, tiling, is_sorted=arguments["pairs_ptr"] is not None),
        **arguments,
        num_warps=tiling.num_warps,
        maxnreg=tiling.registers if isinstance(tiling, Mxfp4Tiling) else None,
        **overlap_options(x),
    )
    return out


def _operands(weight: AnyExpertWeight, tiling: AnyTiling, *, is_sorted: bool) -> dict[str, Any]:
    """Return what the kernel takes for a form of weights."""
    if isinstance(weight, PackedExpertWeight):
        return {
            "FORM": "packed" if is_sorted else "packed pair",
            "weight": (weight.words, weight.pairs, weight.factors, weight.order),
            "tiles": None,
            "bias_ptr": None,
            "DEPTH": 0,
            "PARTS": 1 if is_sorted else tiling.parts,
            "BITS": weight.bits,
            "GROUP": weight.group,
            "num_stages": tiling.num_stages,
        }
    is_mxfp4 = isinstance(weight, Mxfp4ExpertWeight)
    return {
        "FORM": "mxfp4" if is_mxfp4 else "floats",
        "weight": (weight.words, weight.exponents) if is_mxfp4 else (weight.values, weight.scales),
        "tiles": None if is_mxfp4 else describe_weight(weight.values, tiling),
        "bias_ptr": weight.bias,
        "DEPTH": 0 if is_mxfp4 else tiling.depth,
        "PARTS": tiling.parts if is_mxfp4 else 1,
        "BITS": 0,
        "GROUP": 0 if is_mxfp4 else weight.width,
    }


@triton.jit
def _rows_of_x(
    pairs_ptr, tile, end, NUM_CHOSEN: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Return, for the pairs from `tile` on, whether each is below `end`, and its row of x; for all parts."""
    index = tl.arange(0, PARTS * ROWS)
    place = tile + (index if PARTS == 1 else index % ROWS)
    is_row = place < end
    if ACTIVATION is not None:
        if pairs_ptr is not None:
            place = tl.load(pairs_ptr + place, mask=is_row, other=0)
        place //= NUM_CHOSEN
    return is_row, place.to(tl.int64)


@triton.jit
def _rows_of_out(pairs_ptr, tile, end, ACTIVATION: tl.constexpr, ROWS: tl.constexpr):
    """Return, for the pairs from `tile` on, whether each is below `end`, and its row of the result."""
    place = tile + tl.arange(0, ROWS)
    is_row = place < end
    if ACTIVATION is None and pairs_ptr is not None:
        place = tl.load(pairs_ptr + place, mask=is_row, other=0)
    return is_row, place.to(tl.int64)


@triton.jit
def _store_tile(
    total, up_total, bias_ptr, bias_row, out_ptr, out_row, is_row, column, num_columns,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Add biases to sums [COLUMNS, ROWS], combine gate and up where there is an activation, and store."""
    if bias_ptr is not None:
        total += tl.load(bias_ptr + bias_row).to(tl.float32)[:, None]
        if ACTIVATION is not None:
            up_total += tl.load(bias_ptr + bias_row + num_columns).to(tl.float32)[:, None]
    if ACTIVATION is not None:
        total = gate_and_up(total, up_total, ACTIVATION)
    out_at = out_ptr + out_row[:, None] * num_columns + column[None, :]
    inside = is_row[:, None] & (column < num_columns)[None, :]
    tl.store(out_at, tl.trans(total).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _place(
    weight, expert, num_columns, FORM: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    HALVES: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return where a program's tile of an expert's weight begins, as the form has it."""
    if FORM == "floats":
        return place_floats(weight, expert, num_columns, SIZE, COLUMNS, HALVES, DEPTH, GROUP)
    elif FORM == "mxfp4":
        return place_mxfp4(weight, expert, num_columns, SIZE, COLUMNS, HALVES, PARTS)
    elif FORM == "packed":
        return place_packed(weight, expert, num_columns, SIZE, COLUMNS, HALVES, BITS, GROUP)
    else:
        return place_pair(weight, expert, num_columns, SIZE, COLUMNS, HALVES, PARTS, BITS, GROUP)


@triton.jit
def _sum(
    place, tiles, x_ptr, x_row, is_row, pair_row, stride_x, num_columns, FORM: tl.constexpr,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr, DEPTH: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return the products of a tile of the weight and a tile of rows, [columns, ROWS], of gate and of up."""
    if FORM == "floats":
        return sum_floats(
            place, tiles, x_ptr, x_row, is_row, stride_x, num_columns,
            SIZE, ROWS, COLUMNS, HALVES, DEPTH, STAGES, GROUP,
        )  # fmt: skip
    elif FORM == "mxfp4":
        return sum_mxfp4(
            place, x_ptr, x_row, is_row, stride_x, num_columns, SIZE, ROWS, COLUMNS, HALVES, PARTS, STAGES
        )
    elif FORM == "packed":
        return sum_packed(
            place, x_ptr, x_row, is_row, stride_x, num_columns, SIZE, ROWS, COLUMNS, HALVES, BITS, GROUP
        )
    else:
        return sum_pair(
            place, x_ptr, pair_row, stride_x, num_columns,
            SIZE, ROWS, COLUMNS, HALVES, PARTS, STAGES, BITS, GROUP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_slots"])
def _grouped_kernel(
    x_ptr, weight, tiles, bias_ptr, row_scales_ptr, out_ptr, pairs_ptr, starts_ptr,
    num_columns, stride_x, num_slots,
    FORM: tl.constexpr, NUM_CHOSEN: tl.constexpr, SIZE: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, NUM_HELD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of columns, slots, E); or (tiles of columns, 1, pairs), each pair's expert in starts_ptr.

    With an activation x has tokens' rows, else sorted pairs' rows, and COLUMNS rows of the weight are gate
    and up, half of them each. PARTS of K are multiplied at a time. GROUP numbers of a row of the weight share
    a scale; 0: there are none.
    """
    HALVES: tl.constexpr = 1 if ACTIVATION is None else 2
    start_next(OVERLAP)
    if pairs_ptr is None:
        wait_for_previous(OVERLAP)
        pair = tl.program_id(2)
        expert = tl.load(starts_ptr + pair).to(tl.int64)
        if expert < NUM_HELD:
            place = _place(
                weight, expert, num_columns, FORM, SIZE, COLUMNS, HALVES, DEPTH, PARTS, BITS, GROUP
            )  # fmt: skip
            _multiply_tile(
                x_ptr, place, tiles, bias_ptr, row_scales_ptr, out_ptr, pairs_ptr, expert, pair, pair + 1,
                num_columns, stride_x, FORM, NUM_CHOSEN, SIZE, ACTIVATION, ROWS, COLUMNS, HALVES, DEPTH,
                PARTS, STAGES, BITS, GROUP,
            )  # fmt: skip
    else:
        expert = tl.program_id(2).to(tl.int64)
        place = _place(
            weight, expert, num_columns, FORM, SIZE, COLUMNS, HALVES, DEPTH, PARTS, BITS, GROUP
        )  # fmt: skip
        wait_for_previous(OVERLAP)
        first = tl.load(starts_ptr + expert) + tl.program_id(1) * ROWS
        end = tl.load(starts_ptr + expert + 1)
        for tile in range(first, end, num_slots * ROWS):
            _multiply_tile(
                x_ptr, place, tiles, bias_ptr, row_scales_ptr, out_ptr, pairs_ptr, expert, tile, end,
                num_columns, stride_x, FORM, NUM_CHOSEN, SIZE, ACTIVATION, ROWS, COLUMNS, HALVES, DEPTH,
                PARTS, STAGES, BITS, GROUP,
            )  # fmt: skip


@triton.jit
def _multiply_tile(
    x_ptr, place, tiles, bias_ptr, row_scales_ptr, out_ptr, pairs_ptr, expert, tile, end,
    num_columns, stride_x,
    FORM: tl.constexpr, NUM_CHOSEN: tl.constexpr, SIZE: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVES: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of the weight with the rows of pairs from `tile` to `end`, at most ROWS, and store."""
    OWN: tl.constexpr = COLUMNS // HALVES
    column = tl.program_id(0) * OWN + tl.arange(0, OWN)
    bias_row = expert * (HALVES * num_columns) + tl.minimum(column, num_columns - 1)
    is_x_row, x_row = _rows_of_x(pairs_ptr, tile, end, NUM_CHOSEN, ACTIVATION, ROWS, PARTS)
    is_row, out_row = _rows_of_out(pairs_ptr, tile, end, ACTIVATION, ROWS)
    pair_row = tile if ACTIVATION is None else tile // NUM_CHOSEN
    total, up_total = _sum(
        place, tiles, x_ptr, x_row, is_x_row, pair_row, stride_x, num_columns,
        FORM, SIZE, ROWS, COLUMNS, HALVES, DEPTH, PARTS, STAGES, BITS, GROUP,
    )  # fmt: skip
    if row_scales_ptr is not None:
        row_scale = tl.load(row_scales_ptr + x_row, mask=is_row, other=0.0)[None, :]
        total *= row_scale
        up_total *= row_scale
    _store_tile(
        total, up_total, bias_ptr, bias_row, out_ptr, out_row, is_row, column, num_columns, ACTIVATION
    )
