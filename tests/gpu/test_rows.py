"""Matrices whose storage has room for whole tiles of rows."""

import pytest
import torch

from octavo.kernels.padded_rows import TILE_ROWS, new_rows, readable_rows


@pytest.mark.parametrize(("num_rows", "room"), [(0, 0), (1, 1), (2, 64), (64, 64), (65, 128), (128, 128)])
def test_room_for_whole_tiles(num_rows: int, room: int) -> None:
    rows = new_rows(torch.empty(1), num_rows, 48, torch.float16)
    assert rows.shape == (num_rows, 48)
    assert rows.is_contiguous()
    assert rows.dtype == torch.float16
    assert rows.untyped_storage().nbytes() == 2 * 48 * room
    if num_rows:
        assert readable_rows(rows, TILE_ROWS) == room


def test_no_row_is_read_that_the_storage_does_not_hold() -> None:
    x = torch.empty(100, 48)
    assert readable_rows(x, 64) == 100
    assert readable_rows(x[:40], 64) == 64
    assert readable_rows(x[:70], 64) == 100
    assert readable_rows(x[60:70], 64) == 40
    assert readable_rows(x[60:70], 8) == 16
    assert readable_rows(x[:64], 64) == 64
    # Rows of a part of the columns: the last one is whole although what follows it is not there.
    assert readable_rows(x[60:70, 24:], 64) == 40
    assert readable_rows(x[60:70, :24], 64) == 40
    assert readable_rows(x[::2][:10], 64) == 50
    assert readable_rows(x[:1].expand(3, -1), 64) == 3
