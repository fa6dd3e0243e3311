"""Rows of the device's state against plain indexing."""

from itertools import product

import pytest
import torch
from torch import Tensor
from triton_sampling_cases import everywhere

ROWS = [3, -1, 0, 6]


def ints(values: list[int], device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@everywhere
@pytest.mark.parametrize("block_size", [1, 4])
def test_gathered_rows_are_a_decode_steps_inputs(device: str, block_size: int) -> None:
    from octavo.engine.gpu.row_kernels import gather_rows

    positions = [0, 9, 2, 700, 4, 5, 3]
    tokens = ints([10, 11, 12, 13, 14, 15, 16], device)
    tables = torch.arange(2 * 7 * 701, dtype=torch.int32, device=device).view(2, 7, 701)
    # The inputs of a graph are the first places of larger ones.
    steps = torch.full((2, 4, 9), 99, dtype=torch.int32, device=device)[:, :, : len(ROWS)]
    step_tables = torch.full((2, len(ROWS), 701), -7, dtype=torch.int32, device=device)
    gather_rows(ints(ROWS, device), tokens, ints(positions, device), tables, steps, step_tables, block_size)
    for group, (place, row) in product(range(2), enumerate(ROWS)):
        table, step, step_table = tables[group], steps[group], step_tables[group]
        if row < 0:
            assert step[:, place].tolist() == [0, 0, -1, 0]
            assert (step_table[place] == -7).all()
            continue
        position = positions[row]
        slot = int(table[row, position // block_size]) * block_size + position % block_size
        assert step[:, place].tolist() == [position, 10 + row, slot, position + 1]
        num_blocks = position // block_size + 1
        assert torch.equal(step_table[place, :num_blocks], table[row, :num_blocks])
        assert (step_table[place, num_blocks:] == -7).all()


@everywhere
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("filters", [False, True])
def test_gathered_parameters(device: str, dtype: torch.dtype, filters: bool) -> None:
    from octavo.engine.gpu.row_kernels import gather_parameters

    columns = (
        torch.rand(7, device=device),
        ints([2**62 + i for i in range(7)], device, torch.int64),
        ints([5, 6, 7, 8, 9, 10, 11], device),
        ints([0, 1, 2, 3, 4, 5, 6], device),
        torch.rand(7, device=device),
        torch.rand(7, device=device),
    )
    positions = ints([20, 30, 40, 50], device)
    got = gather_parameters(ints(ROWS, device, dtype), positions, columns, filters=filters)
    rows = [max(0, row) for row in ROWS]
    wanted = [column[rows] for column in columns]
    wanted[2] = positions - wanted[2]
    assert len(got) == (6 if filters else 3)
    for values, expected in zip(got, wanted, strict=False):
        assert values.dtype == expected.dtype
        assert torch.equal(values, expected)


@everywhere
def test_rows_move_on_by_what_was_sampled(device: str) -> None:
    from octavo.engine.gpu.row_kernels import advance_rows

    tokens, positions = ints(list(range(100, 107)), device), ints(list(range(7)), device)
    outcome = torch.full((9,), 99, dtype=torch.int32, device=device)
    is_finite = torch.tensor([True, True, False, True], device=device)
    sampled, last = ints([50, 51, 0, 53], device), ints([30, 31, 32, 33], device)
    advance_rows(ints(ROWS, device), sampled, is_finite, last, tokens, positions, outcome)
    assert tokens.tolist() == [0, 101, 102, 50, 104, 105, 53]
    assert positions.tolist() == [33, 1, 2, 31, 4, 5, 34]
    assert outcome.tolist() == [50, 99, -1, 53, 99, 99, 99, 99, 99]
