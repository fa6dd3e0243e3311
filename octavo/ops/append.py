"""Append new keys and values to a paged cache in place, and rotate them and the queries on the way."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.attention.float8 import write_rows
from octavo.errors import InvalidArgumentError
from octavo.ops import debug
from octavo.ops.call import Queries


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
        cu_seqlens: [S + 1] int32, cumulative numbers of new keys; None: all have one length.
        length: new keys of every sequence; 0: they differ.
        cached_lens: [S] int32, tokens in the cache before: where the first new key goes.
        block_table: [S, W] int32.
        k_scale, v_scale: [S, KH] float32 of a float8 cache; None: 1.
    """

    k: Tensor
    v: Tensor
    cu_seqlens: Tensor | None
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
    places = check_append(queries, new, k_cache, rotary)
    row, block, offset, positions, query_positions = (torch.from_numpy(array) for array in places)
    num_new, num_used = row.shape[0], query_positions.shape[0]
    k = new.k[:num_new] if rotary is None else rotate(new.k[:num_new], rotary, positions)
    write_rows(k_cache, (block, offset), k, None if new.k_scale is None else new.k_scale[row])
    write_rows(v_cache, (block, offset), new.v[:num_new], None if new.v_scale is None else new.v_scale[row])
    if rotary is None:
        return queries.q
    return torch.cat([rotate(queries.q[:num_used], rotary, query_positions), queries.q[num_used:]])


class _Places(NamedTuple):
    """Where new keys go and which angles are read, int64 on the host.

    Attributes:
        row: [Tn] sequence of each new key.
        block, offset: [Tn] its slot.
        positions: [Tn] its rotary position; without a rotary embedding empty.
        query_positions: [T] that of each query in a sequence; the same.
    """

    row: np.ndarray
    block: np.ndarray
    offset: np.ndarray
    positions: np.ndarray
    query_positions: np.ndarray


def check_append(queries: Queries, new: NewKeys, k_cache: Tensor, rotary: Rotary | None) -> _Places:
    """Check where new keys go and which angles are read; waits for a GPU."""
    num_sequences = new.cached_lens.shape[0]
    row, index = _split(new.cu_seqlens, num_sequences, new.length, new.k.shape[0], "k")
    block, offset = _find_slots(
        debug.on_host(new.block_table), row, debug.on_host(new.cached_lens)[row] + index, k_cache.shape
    )
    if rotary is None:
        return _Places(row, block, offset, row[:0], row[:0])
    offsets = debug.on_host(rotary.offsets)
    q_row, q_index = _split(queries.cu_seqlens, num_sequences, queries.length, queries.q.shape[0], "q")
    q_positions = offsets[q_row] + q_index if rotary.queries_advance else offsets[q_row]
    positions = offsets[row] + index
    _check_positions(rotary, row, positions)
    _check_positions(rotary, q_row, q_positions)
    return _Places(row, block, offset, positions, q_positions)


def _split(
    cu_seqlens: Tensor | None, num_sequences: int, length: int, num_tokens: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return (sequence [n], index in it [n]) of the tokens between cumulative lengths, checked."""
    if cu_seqlens is None:
        row = np.repeat(np.arange(num_sequences), length)
        return row, np.tile(np.arange(length), num_sequences)
    bounds = debug.on_host(cu_seqlens)
    lens = np.diff(bounds)
    if bounds[0] != 0 or bounds[-1] > num_tokens or lens.min(initial=0) < 0:
        raise InvalidArgumentError(
            f"cumulative lengths of {name} must rise from 0 to at most its {num_tokens} tokens; "
            f"got {bounds.tolist()}"
        )
    row = np.repeat(np.arange(lens.shape[0]), lens)
    return row, np.arange(row.shape[0]) - bounds[row]


def _check_positions(rotary: Rotary, row: np.ndarray, position: np.ndarray) -> None:
    bad = (position < 0) | (position >= rotary.cos.shape[0])
    if bad.any():
        at = int(bad.argmax())
        raise InvalidArgumentError(
            f"rotary_cos and rotary_sin have {rotary.cos.shape[0]} rows, a token of sequence {row[at]} is at "
            f"position {position[at]}; give longer ones"
        )


def _find_slots(
    table: np.ndarray, row: np.ndarray, position: np.ndarray, cache_shape: torch.Size
) -> tuple[np.ndarray, np.ndarray]:
    """Return (block [Tn], offset [Tn]) of each new key, checked."""
    num_blocks, block_size = cache_shape[:2]
    capacity = table.shape[1] * block_size
    bad = (position < 0) | (position >= capacity)
    if bad.any():
        at = int(bad.argmax())
        raise InvalidArgumentError(
            f"the cache of sequence {row[at]} holds {capacity} tokens, a new key would go to position "
            f"{position[at]}; check cache_seqlens, or widen the cache"
        )
    column, offset = np.divmod(position, max(1, block_size))
    block = table[row, column]
    bad = (block < 0) | (block >= num_blocks)
    if bad.any():
        at = int(bad.argmax())
        raise InvalidArgumentError(
            f"block_table[{row[at]}, {column[at]}] is {block[at]}, but blocks go from 0 to {num_blocks - 1}; "
            f"a new key of sequence {row[at]} would go there"
        )
    return block, offset


def rotate(x: Tensor, rotary: Rotary, position: Tensor) -> Tensor:
    """Rotate x [T, H, D] at position [T] in float32 (float64 for float64); return it in its dtype."""
    half = rotary.cos.shape[1]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (table[position].to(dtype).unsqueeze(1) for table in (rotary.cos, rotary.sin))
    turned, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    first, second = (
        (turned[..., ::2], turned[..., 1::2]) if rotary.interleaved else turned.tensor_split(2, dim=-1)
    )
    pair = (first * cos - second * sin, first * sin + second * cos)
    turned = torch.stack(pair, dim=-1).flatten(-2) if rotary.interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)
