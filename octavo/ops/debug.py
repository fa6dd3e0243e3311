"""Checks of lengths and block ids that look at device memory. On a GPU they run with OCTAVO_DEBUG=1 only.

They wait for the device. While a CUDA graph is captured nothing can be waited for, so they are off.
"""

import os

import numpy as np
import torch
from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.ops.call import Call


def is_on() -> bool:
    """Say whether the environment variable OCTAVO_DEBUG asks for checks."""
    if os.environ.get("OCTAVO_DEBUG", "") in ("", "0"):
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def check_call(call: Call) -> None:
    """Check the lengths of queries and keys, and the block ids that they reach.

    Raises:
        InvalidArgumentError: names the first sequence that is wrong.
    """
    keys = call.keys
    queries = call.queries.ragged(keys.seq_lens)
    _check_queries(on_host(queries.cu_seqlens), queries.q.shape[0], _used(call))
    seq_lens = on_host(keys.seq_lens)
    begin = np.zeros_like(seq_lens) if keys.begin is None else on_host(keys.begin)
    for s, (first, end) in enumerate(zip(begin.tolist(), seq_lens.tolist(), strict=True)):
        if first < 0 or not 0 <= end <= keys.capacity:
            raise InvalidArgumentError(
                f"sequence {s} has keys from {first} to {end}, but its cache holds {keys.capacity} tokens; "
                f"check its lengths and the width of block_table"
            )
    _check_blocks(on_host(keys.block_table), begin, seq_lens, keys.k.shape[0], keys.k.shape[1])


def _used(call: Call) -> np.ndarray | None:
    return None if call.queries.used is None else on_host(call.queries.used)


def on_host(tensor: Tensor) -> np.ndarray:
    """Return integers as int64 on the host; waits for a GPU."""
    return tensor.cpu().numpy().astype(np.int64)


def _check_queries(bounds: np.ndarray, num_tokens: int, used: np.ndarray | None) -> None:
    lens = np.diff(bounds)
    if bounds[0] != 0 or bounds[-1] > num_tokens or lens.min(initial=0) < 0:
        raise InvalidArgumentError(
            f"cu_seqlens_q must rise from 0 to at most the {num_tokens} tokens of q; got {bounds.tolist()}"
        )
    if used is not None and ((used < 0) | (used > lens)).any():
        s = int(((used < 0) | (used > lens)).argmax())
        raise InvalidArgumentError(
            f"seqused_q[{s}] must be 0 to the {lens[s]} queries of sequence {s}; got {used[s]}"
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
