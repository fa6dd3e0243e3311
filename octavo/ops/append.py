"""Append new keys and values to a paged cache in place, and rotate them and the queries on the way."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention.float8 import write_rows
from octavo.errors import InvalidArgumentError
from octavo.ops.arguments import rows_of


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary embedding of the first 2 R dimensions of queries and new keys.

    Attributes:
        cos, sin: [P, R], any float dtype, by position.
        interleaved: rotate dimensions (2 i, 2 i + 1) together, else (i, R + i).
        offsets: [S] int32, position of each sequence's first new key and first query.
        queries_advance: query i is at offset + i; else all queries are at the offset.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool
    offsets: Tensor
    queries_advance: bool


@dataclass(frozen=True, slots=True)
class NewKeys:
    """New keys and values, and where they go.

    Attributes:
        k: [Tn, KH, D].
        v: [Tn, KH, Dv].
        cu_seqlens: [S + 1] int32, cumulative numbers of new keys.
        cached_lens: [S] int32, tokens in the cache before: where the first new key goes.
        block_table: [S, W] int32.
        k_scale, v_scale: [S, KH] float32 of a float8 cache; None: 1.
    """

    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    cached_lens: Tensor
    block_table: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


def append(
    q: Tensor,
    cu_seqlens_q: Tensor,
    new: NewKeys,
    k_cache: Tensor,
    v_cache: Tensor,
    rotary: Rotary | None,
) -> Tensor:
    """Write new keys (rotated) and values to their slots; return the queries (rotated, else q itself).

    Args:
        q: [T, H, D] queries.
        cu_seqlens_q: [S + 1] int32.
        new: the keys and values.
        k_cache: [N, B, KH, D], any strides; written.
        v_cache: [N, B, KH, Dv], any strides; written.
        rotary: None: nothing is rotated.

    Raises:
        InvalidArgumentError: (on a CPU) a key has no slot, or a position no row of cos and sin.
    """
    return append_torch(q, cu_seqlens_q, new, k_cache, v_cache, rotary)


def append_torch(
    q: Tensor,
    cu_seqlens_q: Tensor,
    new: NewKeys,
    k_cache: Tensor,
    v_cache: Tensor,
    rotary: Rotary | None,
) -> Tensor:
    """See append; in PyTorch, for CPUs: it looks at lengths on the host."""
    num_new = int(new.cu_seqlens[-1])
    token = torch.arange(num_new, dtype=torch.int32, device=q.device)
    row = rows_of(new.cu_seqlens, token)
    index = token - new.cu_seqlens[row]
    k = new.k[:num_new]
    if rotary is not None:
        k = rotate(k, rotary, rotary.offsets[row] + index)
    position = (new.cached_lens[row] + index).long()
    slots = _find_slots(new.block_table, row, position, k_cache.shape)
    write_rows(k_cache, slots, k, None if new.k_scale is None else new.k_scale[row])
    write_rows(v_cache, slots, new.v[:num_new], None if new.v_scale is None else new.v_scale[row])
    return q if rotary is None else _rotate_queries(q, cu_seqlens_q, rotary)


def _rotate_queries(q: Tensor, cu_seqlens_q: Tensor, rotary: Rotary) -> Tensor:
    num_used = int(cu_seqlens_q[-1])
    token = torch.arange(num_used, dtype=torch.int32, device=q.device)
    row = rows_of(cu_seqlens_q, token)
    position = rotary.offsets[row]
    if rotary.queries_advance:
        position = position + token - cu_seqlens_q[row]
    return torch.cat([rotate(q[:num_used], rotary, position), q[num_used:]])


def rotate(x: Tensor, rotary: Rotary, position: Tensor) -> Tensor:
    """Rotate x [T, H, D] at position [T] in float32 (float64 for float64); return it in its dtype."""
    num_positions, half = rotary.cos.shape
    bad = torch.nonzero((position < 0) | (position >= num_positions))
    if bad.shape[0]:
        raise InvalidArgumentError(
            f"rotary_cos and rotary_sin have {num_positions} rows, a token is at position "
            f"{int(position[bad[0, 0]])}; give longer ones"
        )
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (table[position.long()].to(dtype).unsqueeze(1) for table in (rotary.cos, rotary.sin))
    turned, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    first, second = (
        (turned[..., ::2], turned[..., 1::2]) if rotary.interleaved else turned.tensor_split(2, dim=-1)
    )
    pair = (first * cos - second * sin, first * sin + second * cos)
    turned = torch.stack(pair, dim=-1).flatten(-2) if rotary.interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def _find_slots(
    block_table: Tensor, row: Tensor, position: Tensor, cache_shape: torch.Size
) -> tuple[Tensor, Tensor]:
    """Return (block [Tn], offset [Tn]) of each new key, checked."""
    num_blocks, block_size = cache_shape[:2]
    capacity = block_table.shape[1] * block_size
    bad = torch.nonzero((position < 0) | (position >= capacity))
    if bad.shape[0]:
        at = bad[0, 0]
        raise InvalidArgumentError(
            f"the cache of sequence {int(row[at])} holds {capacity} tokens, a new key would go to position "
            f"{int(position[at])}; check cache_seqlens, or widen the cache"
        )
    column = position // max(1, block_size)
    block = block_table[row, column].long()
    bad = torch.nonzero((block < 0) | (block >= num_blocks))
    if bad.shape[0]:
        at = bad[0, 0]
        raise InvalidArgumentError(
            f"block_table[{int(row[at])}, {int(column[at])}] is {int(block[at])}, but blocks go from 0 to "
            f"{num_blocks - 1}; a new key of sequence {int(row[at])} would go there"
        )
    return block, position % max(1, block_size)
