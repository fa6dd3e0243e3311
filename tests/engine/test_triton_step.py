"""Advancing a batch of decoding sequences on a GPU."""

import pytest
import torch
from triton_sampling_cases import everywhere

from octavo.errors import InvalidArgumentError


def advanced(
    device: str, slot_dtype: torch.dtype, seq_lens: list[int], sampled: list[int], *, spare: int = 0
) -> tuple[list[int], ...]:
    """Advance rows whose block tables are [10 r + 1, 10 r + 2, 10 r + 3], blocks of 4 tokens."""
    from octavo.engine.triton_step import advance_decode_step

    num_rows = len(seq_lens)
    size = num_rows + spare
    lens = torch.tensor(seq_lens + [9] * spare, dtype=torch.int32, device=device)
    positions = lens - 1
    input_ids = torch.full((size,), -7, dtype=torch.int32, device=device)
    slots = torch.full((size,), -7, dtype=slot_dtype, device=device)
    table = torch.arange(size, device=device, dtype=torch.int32)[:, None] * 10 + torch.arange(
        1, 6, device=device, dtype=torch.int32
    )
    sampled_ids = torch.tensor(sampled, dtype=torch.int32, device=device)
    advance_decode_step(sampled_ids, input_ids, positions, lens, slots, table[:, :3], 4)
    return input_ids.tolist(), positions.tolist(), lens.tolist(), slots.tolist()


@everywhere
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_advance_crosses_block_edges(device: str, slot_dtype: torch.dtype) -> None:
    """Trap: t % block_size == 0. Lengths B - 1, B, B + 1, 2 B of B = 4."""
    input_ids, positions, seq_lens, slots = advanced(device, slot_dtype, [3, 4, 5, 8], [50, 51, 52, 53])
    assert input_ids == [50, 51, 52, 53]
    assert positions == [3, 4, 5, 8]
    assert seq_lens == [4, 5, 6, 9]
    assert slots == [1 * 4 + 3, 12 * 4, 22 * 4 + 1, 33 * 4]


@everywhere
def test_dead_rows_stay_dead(device: str) -> None:
    """Trap: finished sequences that go on writing."""
    input_ids, positions, seq_lens, slots = advanced(device, torch.int64, [0, 6, 0], [50, 51, 52])
    assert input_ids == [-7, 51, -7]
    assert positions == [-1, 6, -1]
    assert seq_lens == [0, 7, 0]
    assert slots == [-1, 12 * 4 + 2, -1]


@everywhere
def test_advance_beyond_the_block_table_stores_nothing(device: str) -> None:
    assert advanced(device, torch.int64, [11, 12], [50, 51])[3] == [3 * 4 + 3, -1]


@everywhere
def test_advance_many_rows_and_no_others(device: str) -> None:
    input_ids, positions, seq_lens, slots = advanced(
        device, torch.int64, [6] * 300, list(range(300)), spare=3
    )
    assert input_ids == [*range(300), -7, -7, -7]
    assert positions == [6] * 300 + [8] * 3
    assert seq_lens == [7] * 300 + [9] * 3
    assert slots == [(10 * row + 2) * 4 + 2 for row in range(300)] + [-7] * 3


@everywhere
def test_advance_refuses_what_does_not_fit(device: str) -> None:
    from octavo.engine.triton_step import advance_decode_step

    short, long = (torch.zeros(size, dtype=torch.int32, device=device) for size in (2, 3))
    with pytest.raises(InvalidArgumentError, match="seq_lens must hold at least 3"):
        advance_decode_step(long, long, long, short, long, long[:, None], 4)
