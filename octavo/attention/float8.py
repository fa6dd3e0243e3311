"""Rows of a paged cache in PyTorch, whatever it is made of: float8 (e4m3) is scaled and saturates.

A number x of a float8 cache is stored as x / scale, with one scale for each kv head; one that float8 cannot
hold becomes its largest, 448, with the sign of x.
"""

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max

Index = tuple[Tensor | int, ...]


def write_rows(cache: Tensor, index: Index, rows: Tensor, scale: Tensor | None) -> None:
    """Set cache[index] = rows.

    Args:
        cache: [N, B, KH, D]; written.
        index: of blocks, or of blocks and tokens in them.
        rows: [..., KH, D] in any float dtype.
        scale: [KH] float32 of a float8 cache; None: 1.
    """
    if cache.dtype != FLOAT8:
        cache[index] = rows
        return
    rows = rows.float() if scale is None else rows.float() / scale.unsqueeze(-1)
    # Conversions of torch differ between versions: some make NaN of what is too large.
    rows = rows.clamp(-LARGEST, LARGEST).to(FLOAT8)
    as_bytes(cache)[index] = as_bytes(rows)


def read_rows(cache: Tensor, index: Index, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Return cache[index] as a new [..., KH, D] of a dtype; arguments as of write_rows."""
    if cache.dtype != FLOAT8:
        return cache[index].to(dtype)
    rows = as_bytes(cache)[index].view(FLOAT8).to(dtype)
    return rows if scale is None else rows * scale.to(dtype).unsqueeze(-1)


def as_bytes(cache: Tensor) -> Tensor:
    """View float8 as bytes, for which every device has all indexing; other dtypes as they are."""
    return cache.view(torch.uint8) if cache.dtype == FLOAT8 else cache
