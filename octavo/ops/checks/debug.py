"""Checks of lengths and block ids that look at device memory. On a GPU they run with OCTAVO_DEBUG=1 only.

They wait for the device. While a CUDA graph is captured nothing can be waited for, so they are off.
"""

import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.ops.call import Call, Queries, is_on_gpu


def is_on() -> bool:
    """Say whether the environment variable OCTAVO_DEBUG asks for checks."""
    if os.environ.get("OCTAVO_DEBUG", "") in ("", "0"):
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def may_read(tensor: Tensor) -> bool:
    """Say whether checks may look at a tensor's numbers: on a CPU, or on a GPU where is_on."""
    return not torch.compiler.is_compiling() and (not is_on_gpu(tensor) or is_on())


def check_call(call: Call) -> None:
    """Check the lengths of queries and keys, and the block ids that they reach.

    Raises:
        InvalidArgumentError: names the first sequence that is wrong.
    """
    keys = call.keys
    check_queries(call.queries, keys.seq_lens.shape[0])
    seq_lens = on_host(keys.seq_lens)
    begin = np.zeros_like(seq_lens) if keys.begin is None else on_host(keys.begin)
    check_keys(begin, seq_lens, on_host(keys.block_table), keys.k.shape)


def on_host(tensor: Tensor) -> np.ndarray:
    """Return integers as int64 on the host; waits for a GPU."""
    return tensor.cpu().numpy().astype(np.int64)


def check_queries(queries: Queries, num_sequences: int) -> None:
    """Check the lengths of queries; see check_call."""
    num_tokens = queries.q.shape[0]
    if queries.cu_seqlens is None:
        lens = np.full(num_sequences, queries.length)
    else:
        lens = np.diff(bounds_on_host("cu_seqlens_q", queries.cu_seqlens, num_tokens, "q"))
        if lens.max(initial=0) > queries.max_len:
            s = int(lens.argmax())
            raise InvalidArgumentError(
                f"max_seqlen_q is {queries.max_len}, but sequence {s} has {lens[s]} queries; "
                f"give the most that any has"
            )
    used = lens if queries.used is None else on_host(queries.used)
    bad = (used < 0) | (used > lens)
    if bad.any():
        s = int(bad.argmax())
        raise InvalidArgumentError(
            f"seqused_q[{s}] must be 0 to the {lens[s]} queries of sequence {s}; got {used[s]}"
        )


def check_ragged_keys(cu_seqlens_k: Tensor, seqused_k: Tensor | None, num_tokens: int) -> None:
    """Check the lengths of ragged keys, num_tokens in all; see flash_attn_varlen_func."""
    lens = np.diff(bounds_on_host("cu_seqlens_k", cu_seqlens_k, num_tokens, "k"))
    used = lens if seqused_k is None else on_host(seqused_k)
    bad = (used < 0) | (used > lens)
    if bad.any():
        s = int(bad.argmax())
        raise InvalidArgumentError(
            f"seqused_k[{s}] must be 0 to the {lens[s]} keys of sequence {s}; got {used[s]}"
        )


def check_paged_keys(cu_seqlens_k: Tensor) -> None:
    """Check cumulative lengths of paged keys, of which only the differences count."""
    lens = np.diff(on_host(cu_seqlens_k))
    if lens.min(initial=0) < 0:
        s = int(lens.argmin())
        raise InvalidArgumentError(f"cu_seqlens_k must not fall; sequence {s} has {lens[s]} keys by it")


def bounds_on_host(name: str, cu_seqlens: Tensor, num_tokens: int, of: str) -> np.ndarray:
    """Return cumulative lengths [S + 1] of a ragged tensor, int64 on the host, checked; waits for a GPU."""
    bounds = on_host(cu_seqlens)
    if bounds[0] != 0 or bounds[-1] > num_tokens or np.diff(bounds).min(initial=0) < 0:
        raise InvalidArgumentError(
            f"{name} must rise from 0 to at most the {num_tokens} tokens of {of}; got {bounds.tolist()}"
        )
    return bounds


def check_keys(
    begin: np.ndarray, seq_lens: np.ndarray, table: np.ndarray, cache_shape: Sequence[int]
) -> None:
    """Check keys from begin [S] to seq_lens [S] of a block table [S, W], all int64; see check_call."""
    check_lengths(begin, seq_lens, table.shape[1] * cache_shape[1])
    _check_blocks(table, begin, seq_lens, cache_shape[0], max(1, cache_shape[1]))


def check_rows(cache_batch_idx: Tensor, num_rows: int) -> None:
    """Check the rows of the block table that sequences take."""
    rows = on_host(cache_batch_idx)
    bad = (rows < 0) | (rows >= num_rows)
    if bad.any():
        s = int(bad.argmax())
        raise InvalidArgumentError(
            f"cache_batch_idx[{s}] is {rows[s]}, but rows of block_table go from 0 to {num_rows - 1}"
        )


def check_lengths(begin: np.ndarray, seq_lens: np.ndarray, capacity: int) -> None:
    """Check that the keys from begin [S] to seq_lens [S] are within the cache."""
    bad = (begin < 0) | (seq_lens > capacity)
    if bad.any():
        s = int(bad.argmax())
        raise InvalidArgumentError(
            f"sequence {s} has keys from {begin[s]} to {seq_lens[s]}, but its cache holds {capacity} tokens; "
            f"check its lengths and the width of block_table"
        )


def _check_blocks(
    table: np.ndarray, begin: np.ndarray, seq_lens: np.ndarray, num_blocks: int, block_size: int
) -> None:
    column = np.arange(table.shape[1])
    is_read = (column >= (begin // block_size)[:, None]) & (column < -(-seq_lens // block_size)[:, None])
    bad = np.argwhere(is_read & ((table < 0) | (table >= num_blocks)))
    if bad.shape[0]:
        s, at = bad[0].tolist()
        raise InvalidArgumentError(
            f"block_table[{s}, {at}] is {table[s, at]}, but blocks go from 0 to {num_blocks - 1}; "
            f"sequence {s} has {seq_lens[s]} tokens in blocks of {block_size}"
        )
