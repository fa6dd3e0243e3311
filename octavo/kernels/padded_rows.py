"""Matrices whose storage has room for whole tiles of rows.

TMA is slow at filling rows of a tile that a tensor lacks: 3 ns each, where a whole tile takes 300. So kernels
let it copy whatever lies behind the last row, and store nothing of it.
"""

import torch
from torch import Tensor

# Rows of a tile of most kernels.
TILE_ROWS = 64


def new_rows(like: Tensor, num_rows: int, num_columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return a new contiguous [num_rows, num_columns] with room for a multiple of TILE_ROWS rows behind it.

    Args:
        like: a tensor on the same device, and of the same dtype if dtype is None.
        num_rows: any number; a single row gets no room.
        num_columns: any number.
        dtype: the result's.
    """
    room = num_rows if num_rows <= 1 else -(-num_rows // TILE_ROWS) * TILE_ROWS
    return like.new_empty(room, num_columns, dtype=dtype)[:num_rows]


def readable_rows(x: Tensor, multiple: int) -> int:
    """Return how many rows of x's storage may be read: its own, and further ones up to a multiple.

    Args:
        x: [M, K], M at least 1, last dimension contiguous.
        multiple: a number of rows.
    """
    num_rows, num_columns = x.shape
    apart = x.stride(0)
    wanted = -(-num_rows // multiple) * multiple
    if wanted == num_rows or apart == 0:
        return num_rows
    room = int(x.untyped_storage().nbytes() // x.itemsize - x.storage_offset())
    return max(num_rows, min(wanted, (room - num_columns) // apart + 1))
