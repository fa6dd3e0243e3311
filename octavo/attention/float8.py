"""Read and write rows of a paged cache of any dtype in PyTorch.

A float8 (e4m3) cache stores x / scale, with one scale per kv head, saturated to +-448.
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
        index: block ids, or block ids and offsets within them.
        rows: [..., KH, D] in any float dtype.
        scale: [KH] float32 of a float8 cache; None: 1.
    """
    if cache.dtype != FLOAT8:
        cache[index] = rows.to(cache.dtype)
        return
    rows = rows.float() if scale is None else rows.float() / scale.unsqueeze(-1)
    # Clamped here because some versions of torch convert numbers beyond the range to NaN.
    rows = rows.clamp(-LARGEST, LARGEST).to(FLOAT8)
    as_bytes(cache)[index] = as_bytes(rows)


def read_rows(cache: Tensor, index: Index, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Return cache[index] as a new [..., KH, D] of a dtype; arguments as for write_rows."""
    if cache.dtype != FLOAT8:
        return cache[index].to(dtype)
    rows = as_bytes(cache)[index].view(FLOAT8).to(dtype)
    return rows if scale is None else rows * scale.to(dtype).unsqueeze(-1)


def scale_of(scale: Tensor | None, sequences: Tensor | int) -> Tensor | None:
    """Return the scale of a sequence, [KH], or of several [X], [X, 1, KH] to scale [X, keys, KH, D].

    Args:
        scale: [KH] for all sequences, [S, KH] for each, or None.
        sequences: rows of the block table.
    """
    if scale is None or scale.dim() == 1:
        return scale
    return scale[sequences] if isinstance(sequences, int) else scale[sequences].unsqueeze(1)


def as_bytes(cache: Tensor) -> Tensor:
    """View a float8 tensor as bytes, because float8 lacks some indexing; return other tensors unchanged."""
    return cache.view(torch.uint8) if cache.dtype == FLOAT8 else cache
