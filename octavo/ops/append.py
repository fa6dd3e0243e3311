"""Append new keys and values to a paged cache in place, and rotate them and the queries on the way."""

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.attention.cache import write_rows
from octavo.errors import InvalidArgumentError
from octavo.ops.call import NewKeys, Queries, Rotary, is_on_gpu
from octavo.ops.checks import debug


def append(
    queries: Queries, new: NewKeys, k_cache: Tensor, v_cache: Tensor, rotary: Rotary | None
) -> tuple[Tensor, Tensor]:
    """Write new keys (rotated) and values to their slots.

    Args:
        queries: T queries.
        new: the keys and values.
        k_cache: [N, B, KH, D], any strides; written.
        v_cache: [N, B, KH, Dv], any strides; written.
        rotary: None: nothing is rotated.

    Returns:
        (queries, rotated or q itself; new.lengths_after()).

    Raises:
        InvalidArgumentError: (on a CPU, or on a GPU with OCTAVO_DEBUG=1) a key has no slot, or a position no
            row of cos and sin.
    """
    if not is_on_gpu(queries.q):
        return append_torch(queries, new, k_cache, v_cache, rotary), new.lengths_after()
    if debug.is_on():
        check_append(queries, new, k_cache, rotary)
    from octavo.ops.triton import append_kernel

    return append_kernel.append(queries, new, k_cache, v_cache, rotary)


def append_torch(
    queries: Queries, new: NewKeys, k_cache: Tensor, v_cache: Tensor, rotary: Rotary | None
) -> Tensor:
    """Do what `append` does in PyTorch, for CPUs. Reads lengths on the host; writes nothing if it raises."""
    places = check_append(queries, new, k_cache, rotary)
    token, row, block, offset, positions, query_positions = (torch.from_numpy(array) for array in places)
    k, v = new.k, new.v
    if token.shape[0] < k.shape[0]:
        k, v = k[token], v[token]
    k = k if rotary is None else rotate(k, rotary, positions)
    write_rows(k_cache, (block, offset), k, None if new.k_scale is None else new.k_scale[row])
    write_rows(v_cache, (block, offset), v, None if new.v_scale is None else new.v_scale[row])
    if rotary is None:
        return queries.q
    num_used = query_positions.shape[0]
    rotated = rotate(queries.q[:num_used], rotary, query_positions)
    return torch.cat([rotated, queries.q[num_used:]]) if num_used < queries.q.shape[0] else rotated


class _Places(NamedTuple):
    """Where new keys go and which rotary angles are read, int64 on the host.

    Attributes:
        token: [n] indices of the new keys that are stored.
        row: [n] their sequences.
        block, offset: [n] their slots.
        positions: [n] their rotary positions; empty without a rotary embedding.
        query_positions: [T] rotary position of each query in a sequence; likewise.
    """

    token: np.ndarray
    row: np.ndarray
    block: np.ndarray
    offset: np.ndarray
    positions: np.ndarray
    query_positions: np.ndarray


def check_append(queries: Queries, new: NewKeys, k_cache: Tensor, rotary: Rotary | None) -> _Places:
    """Check lengths, block ids (old and new) and rotary positions; waits for a GPU."""
    cached, table = debug.on_host(new.cached_lens), debug.on_host(new.block_table)
    num_sequences = cached.shape[0]
    if queries.cu_seqlens is not None or queries.used is not None:
        debug.check_queries(queries, num_sequences)
    begin = np.zeros_like(cached) if new.begin is None else debug.on_host(new.begin)
    row, index = _split(new.cu_seqlens, num_sequences, new.length, new.k.shape[0], "cu_seqlens_k_new")
    token = np.flatnonzero(cached[row] >= 0)
    row, index = row[token], index[token]
    block, offset = _find_slots(table, row, cached[row] + index, k_cache.shape)
    debug.check_keys(begin, cached, table, k_cache.shape)
    if rotary is None:
        return _Places(token, row, block, offset, row[:0], row[:0])
    offsets = debug.on_host(rotary.offsets)
    q_row, q_index = _split(
        queries.cu_seqlens, num_sequences, queries.length, queries.q.shape[0], "cu_seqlens_q"
    )
    q_positions = offsets[q_row] + q_index if rotary.queries_advance else offsets[q_row]
    positions = offsets[row] + index
    _check_positions(rotary, row, positions)
    # Queries of an empty sequence, and those that do not count, see nothing, whatever their angle.
    sees_nothing = cached[q_row] < 0
    if queries.used is not None:
        sees_nothing |= q_index >= debug.on_host(queries.used)[q_row]
    q_positions[sees_nothing] = 0
    _check_positions(rotary, q_row[~sees_nothing], q_positions[~sees_nothing])
    return _Places(token, row, block, offset, positions, q_positions)


def _split(
    cu_seqlens: Tensor | None, num_sequences: int, length: int, num_tokens: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return (sequence [n], index in it [n]) of the tokens of k or q, by checked cumulative lengths."""
    if cu_seqlens is None:
        return _split_evenly(num_sequences, length)
    of = "k" if name == "cu_seqlens_k_new" else "q"
    bounds = debug.bounds_on_host(name, cu_seqlens, num_tokens, of)
    row = np.repeat(np.arange(num_sequences), np.diff(bounds))
    return row, np.arange(row.shape[0]) - bounds[row]


@functools.lru_cache(maxsize=16)
def _split_evenly(num_sequences: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    return np.repeat(np.arange(num_sequences), length), np.tile(np.arange(length), num_sequences)


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
            f"{position[at]}; check cache_seqlens, or widen block_table (without one, the cache)"
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


@torch.autocast("cpu", enabled=False)
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
