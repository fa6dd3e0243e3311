"""Append new keys and values to a paged cache in place, and rotate them and the queries on the way."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention.float8 import write_rows
from octavo.errors import InvalidArgumentError
from octavo.ops import debug
from octavo.ops.call import Queries, rows_of


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
        length: new keys of every sequence; 0: they differ.
        cached_lens: [S] int32, tokens in the cache before: where the first new key goes.
        block_table: [S, W] int32.
        k_scale, v_scale: [S, KH] float32 of a float8 cache; None: 1.
    """

    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    length: int
    cached_lens: Tensor
    block_table: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


def append(queries: Queries, new: NewKeys, k_cache: Tensor, v_cache: Tensor, rotary: Rotary | None) -> Tensor:
    """Write new keys (rotated) and values to their slots; return the queries (rotated, else q itself).

    Args:
        queries: T queries.
        new: the keys and values.
        k_cache: [N, B, KH, D], any strides; written.
        v_cache: [N, B, KH, Dv], any strides; written.
        rotary: None: nothing is rotated.

    Raises:
        InvalidArgumentError: (on a CPU, or on a GPU with OCTAVO_DEBUG=1) a key has no slot, or a position no
            row of cos and sin.
    """
    if queries.q.device.type == "cpu":
        return append_torch(queries, new, k_cache, v_cache, rotary)
    if debug.is_on():
        check_append(queries, new, k_cache, rotary)
    from octavo.ops.triton import append as on_gpu

    return on_gpu.append(queries, new, k_cache, v_cache, rotary)


def append_torch(
    queries: Queries, new: NewKeys, k_cache: Tensor, v_cache: Tensor, rotary: Rotary | None
) -> Tensor:
    """See append; in PyTorch, for CPUs: it looks at lengths on the host. Nothing is written if it raises."""
    row, slots, positions, query_positions = check_append(queries, new, k_cache, rotary)
    num_new = row.shape[0]
    k = new.k[:num_new] if rotary is None else rotate(new.k[:num_new], rotary, positions)
    write_rows(k_cache, slots, k, None if new.k_scale is None else new.k_scale[row])
    write_rows(v_cache, slots, new.v[:num_new], None if new.v_scale is None else new.v_scale[row])
    if rotary is None:
        return queries.q
    num_used = query_positions.shape[0]
    return torch.cat([rotate(queries.q[:num_used], rotary, query_positions), queries.q[num_used:]])


def check_append(
    queries: Queries, new: NewKeys, k_cache: Tensor, rotary: Rotary | None
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
    """Check where new keys go and which angles are read; waits for a GPU.

    Returns:
        (sequence [Tn], (block [Tn], offset [Tn]), rotary position [Tn] of each new key, and that of each
        query [T]; without a rotary embedding these two are empty).
    """
    token = torch.arange(_last(new.cu_seqlens, new.k.shape[0], "k"), dtype=torch.int32, device=k_cache.device)
    row = rows_of(new.cu_seqlens, token)
    index = token - new.cu_seqlens[row]
    slots = _find_slots(new.block_table, row, (new.cached_lens[row] + index).long(), k_cache.shape)
    if rotary is None:
        return row, slots, token[:0], token[:0]
    q_token = torch.arange(
        _last(queries.cu_seqlens, queries.q.shape[0], "q"), dtype=torch.int32, device=k_cache.device
    )
    q_row = queries.rows(q_token)
    q_positions = rotary.offsets[q_row]
    if rotary.queries_advance:
        q_positions = q_positions + q_token - queries.cu_seqlens[q_row]
    positions = rotary.offsets[row] + index
    _check_positions(rotary, row, positions)
    _check_positions(rotary, q_row, q_positions)
    return row, slots, positions, q_positions


def _last(cu_seqlens: Tensor, num_tokens: int, name: str) -> int:
    """Return the number of tokens in sequences, checked."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] > num_tokens or bounds != sorted(bounds):
        raise InvalidArgumentError(
            f"cumulative lengths of {name} must rise from 0 to at most its {num_tokens} tokens; got {bounds}"
        )
    return bounds[-1]


def _check_positions(rotary: Rotary, row: Tensor, position: Tensor) -> None:
    bad = torch.nonzero((position < 0) | (position >= rotary.cos.shape[0]))
    if bad.shape[0]:
        at = bad[0, 0]
        raise InvalidArgumentError(
            f"rotary_cos and rotary_sin have {rotary.cos.shape[0]} rows, a token of sequence "
            f"{int(row[at])} is at position {int(position[at])}; give longer ones"
        )


def rotate(x: Tensor, rotary: Rotary, position: Tensor) -> Tensor:
    """Rotate x [T, H, D] at position [T] in float32 (float64 for float64); return it in its dtype."""
    half = rotary.cos.shape[1]
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
