"""Kernels that gather a decode step's inputs from the rows of the device's state, and move the rows on.

Imported only where Triton runs.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.engine.sampling.option_table import FILTERS
from octavo.kernels.launch import launch

_COLUMNS = 128


def gather_rows(
    rows: Tensor,
    tokens: Tensor,
    positions: Tensor,
    table: Tensor,
    step: Tensor,
    step_table: Tensor,
    block_size: int,
) -> None:
    """Make the inputs of a decode step of sequences that live in rows of a larger state.

        state    row    0    1    2    3          step   0    1    2
                 token  a    b    c    d                 d    b    -     rows = [3, 1, -1]

    Args:
        rows: [S] int32, row of each sequence; -1: padding.
        tokens: [R] int32, the token each row's sequence feeds next.
        positions: [R] int32, that token's position.
        table: [groups, R, C] int32 block ids, of each group of layers.
        step: [groups, 4, S] int32; becomes positions, input ids, slots and sequence lengths, slots those of
            each group. Padding gets token 0, position 0, slot -1 and length 0.
        step_table: [groups, S, C] int32; becomes the sequences' block ids, as many as they use.
        block_size: B, tokens.
    """
    launch(
        _gather_kernel,
        (rows.shape[0], table.shape[0]),
        rows_ptr=rows,
        tokens_ptr=tokens,
        positions_ptr=positions,
        table_ptr=table,
        step_ptr=step,
        step_table_ptr=step_table,
        stride_group=table.stride(0),
        stride_table=table.stride(1),
        stride_step_group=step.stride(0),
        stride_step=step.stride(1),
        stride_step_table_group=step_table.stride(0),
        stride_step_table=step_table.stride(1),
        block_size=block_size,
        COLUMNS=_COLUMNS,
    )


def advance_rows(
    rows: Tensor,
    sampled: Tensor,
    is_finite: Tensor,
    last_positions: Tensor,
    tokens: Tensor,
    positions: Tensor,
    outcome: Tensor,
) -> None:
    """Give rows the tokens sampled for them.

    Args:
        rows: [S] int32; -1: nothing to do.
        sampled: [S] int32.
        is_finite: [S] bool; False: the logits were not finite.
        last_positions: [S] int32, position of the token before the sampled one.
        tokens: [R] int32; the rows get the sampled tokens.
        positions: [R] int32; the rows get the sampled tokens' positions.
        outcome: at least [S] int32; becomes the sampled token, or -1 where the logits were not finite.
    """
    num_rows = rows.shape[0]
    launch(
        _advance_kernel,
        (-(-num_rows // _COLUMNS),),
        rows_ptr=rows,
        sampled_ptr=sampled,
        is_finite_ptr=is_finite,
        last_positions_ptr=last_positions,
        tokens_ptr=tokens,
        positions_ptr=positions,
        outcome_ptr=outcome,
        num_rows=num_rows,
        BLOCK=_COLUMNS,
    )


def gather_parameters(
    rows: Tensor, positions: Tensor, columns: Sequence[Tensor], *, filters: bool
) -> tuple[Tensor, ...]:
    """Gather the sampling options of sequences that live in rows of a larger state.

    Args:
        rows: [S] int32 or int64, row of each sequence; -1: padding, which gets row 0's.
        positions: [S] int32, position of the token each sequence's logits were computed from.
        columns: [R] each, as SamplingRows has them: temperatures, seeds, first positions, then filters.
        filters: the filters are wanted too.

    Returns:
        New [S] each, of the columns' dtypes: temperatures, seeds, positions less first positions; with
        `filters` the filters too.
    """
    num_filters = len(FILTERS)
    wanted = columns if filters else columns[:-num_filters]
    out = tuple(torch.empty(rows.shape, dtype=column.dtype, device=rows.device) for column in wanted)
    num_places = rows.shape[0]
    # Without filters the kernel does not touch their outputs: any pointer will do.
    outputs = out if filters else out + out[:1] * num_filters
    launch(
        _gather_parameters_kernel,
        (-(-num_places // _COLUMNS),),
        rows,
        positions,
        *columns,
        *outputs,
        num_places,
        FILTERS=filters,
        BLOCK=_COLUMNS,
    )
    return out


@triton.jit(do_not_specialize=["num_places"])
def _gather_parameters_kernel(
    rows_ptr,
    positions_ptr,
    temperatures_ptr,
    seeds_ptr,
    first_positions_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    out_temperatures_ptr,
    out_seeds_ptr,
    out_steps_ptr,
    out_top_k_ptr,
    out_top_p_ptr,
    out_min_p_ptr,
    num_places,
    FILTERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (ceil(S / BLOCK),)."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = place < num_places
    row = tl.maximum(tl.load(rows_ptr + place, mask=exists, other=0), 0).to(tl.int64)
    position = tl.load(positions_ptr + place, mask=exists, other=0)
    tl.store(out_temperatures_ptr + place, tl.load(temperatures_ptr + row), mask=exists)
    tl.store(out_seeds_ptr + place, tl.load(seeds_ptr + row), mask=exists)
    tl.store(out_steps_ptr + place, position - tl.load(first_positions_ptr + row), mask=exists)
    if FILTERS:
        tl.store(out_top_k_ptr + place, tl.load(top_k_ptr + row), mask=exists)
        tl.store(out_top_p_ptr + place, tl.load(top_p_ptr + row), mask=exists)
        tl.store(out_min_p_ptr + place, tl.load(min_p_ptr + row), mask=exists)


@triton.jit
def _gather_kernel(
    rows_ptr,
    tokens_ptr,
    positions_ptr,
    table_ptr,
    step_ptr,
    step_table_ptr,
    stride_group,
    stride_table,
    stride_step_group,
    stride_step,
    stride_step_table_group,
    stride_step_table,
    block_size,
    COLUMNS: tl.constexpr,
):
    """Grid: (S, groups)."""
    place, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    table_ptr += group * stride_group
    step_ptr += group * stride_step_group
    step_table_ptr += group * stride_step_table_group
    row = tl.load(rows_ptr + place).to(tl.int64)
    is_live = row >= 0
    token = tl.load(tokens_ptr + row, mask=is_live, other=0)
    position = tl.load(positions_ptr + row, mask=is_live, other=0)
    table_at = table_ptr + row * stride_table
    block = tl.load(table_at + position // block_size, mask=is_live, other=0)
    slot = tl.where(is_live, block * block_size + position % block_size, -1)
    tl.store(step_ptr + place, position)
    tl.store(step_ptr + stride_step + place, token)
    tl.store(step_ptr + 2 * stride_step + place, slot)
    tl.store(step_ptr + 3 * stride_step + place, tl.where(is_live, position + 1, 0))
    num_blocks = tl.where(is_live, position // block_size + 1, 0)
    begin = num_blocks * 0
    while begin < num_blocks:
        column = begin + tl.arange(0, COLUMNS)
        ids = tl.load(table_at + column, mask=column < num_blocks)
        tl.store(step_table_ptr + place * stride_step_table + column, ids, mask=column < num_blocks)
        begin += COLUMNS


@triton.jit(do_not_specialize=["num_rows"])
def _advance_kernel(
    rows_ptr,
    sampled_ptr,
    is_finite_ptr,
    last_positions_ptr,
    tokens_ptr,
    positions_ptr,
    outcome_ptr,
    num_rows,
    BLOCK: tl.constexpr,
):
    """Grid: (ceil(S / BLOCK),)."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + place, mask=place < num_rows, other=-1).to(tl.int64)
    is_live = row >= 0
    token = tl.load(sampled_ptr + place, mask=is_live, other=0)
    is_finite = tl.load(is_finite_ptr + place, mask=is_live, other=0)
    position = tl.load(last_positions_ptr + place, mask=is_live, other=0)
    tl.store(tokens_ptr + row, token, mask=is_live)
    tl.store(positions_ptr + row, position + 1, mask=is_live)
    tl.store(outcome_ptr + place, tl.where(is_finite, token, -1), mask=is_live)
