"""Attention of one call on a CPU: a plan for its lengths, then one call into C."""

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.attention import ForestPlan, LayerCache
from octavo.attention.cpu.c_calls import attend_planned, plan_struct
from octavo.attention.score_options import ScoreOptions
from octavo.ops.call import Call
from octavo.ops.checks import debug

# Up to this many multiplications, starting a second thread takes longer than the call.
_ONE_THREAD_PRODUCTS = 1 << 17
_LARGEST = np.iinfo(np.int32).max


class HostWork(NamedTuple):
    """The part of a call that follows from its lengths, the same for all layers of a step.

    Attributes:
        plan: the work.
        struct: the plan as the C kernel takes it; it points to the plan's arrays.
        positions: [T] int32 of each query, plus ScoreOptions.shift.
        address: of positions.
        num_pairs: most pairs of a query and a key.
    """

    plan: ForestPlan
    struct: Any
    positions: np.ndarray
    address: int
    num_pairs: int


def host_work(call: Call, options: ScoreOptions) -> HostWork:
    """Return the plan of a call whose queries all count.

    Raises:
        InvalidArgumentError: a length does not fit the queries or the cache.
    """
    keys, queries = call.keys, call.queries
    bounds = queries.length if queries.cu_seqlens is None else queries.cu_seqlens.numpy().tobytes()
    if queries.cu_seqlens is not None:
        debug.check_queries(queries, keys.seq_lens.shape[0])
    begin = None if keys.begin is None else keys.begin.numpy().tobytes()
    return _host_work(
        keys.seq_lens.numpy().tobytes(), bounds, begin, keys.capacity, options.right, options.shift
    )


@functools.lru_cache(maxsize=16)
def _host_work(
    seq_lens: bytes, bounds: bytes | int, begin: bytes | None, capacity: int, right: int | None, shift: int
) -> HostWork:
    """See host_work; all arrays are int32, and an int is the length of every query."""
    ends = np.frombuffer(seq_lens, np.int32)
    first = None if begin is None else np.frombuffer(begin, np.int32)
    # Lengths are checked before the plan is made: a corrupt one would make millions of items.
    debug.check_lengths(np.zeros_like(ends) if first is None else first, ends, capacity)
    lens = np.maximum(ends, 0)
    if isinstance(bounds, int):
        cu_seqlens = np.arange(ends.shape[0] + 1, dtype=np.int32) * bounds
    else:
        cu_seqlens = np.frombuffer(bounds, np.int32)
    made = ForestPlan.flat(lens, cu_seqlens, right=right, may_be_short=True, kv_begin=first)
    num_queries = np.diff(cu_seqlens)
    last = np.repeat(lens.astype(np.int64) - cu_seqlens[1:], num_queries)
    positions = np.minimum(last + np.arange(last.shape[0]) + shift, _LARGEST - 1).astype(np.int32)
    num_keys = (made.item_kv_end - made.item_kv_begin).astype(np.int64)
    num_pairs = int((num_keys * np.diff(made.item_token_begin)).sum())
    return HostWork(made, plan_struct(made), positions, positions.ctypes.data, num_pairs)


def attend(call: Call, cache: LayerCache, options: ScoreOptions) -> tuple[Tensor, Tensor]:
    """Attend by the C kernel. The call has no plan of its own, and choose_for_call has returned "c".

    Raises:
        InvalidArgumentError: a length or a block id is out of range.
    """
    q, host = call.queries.q, host_work(call, options)
    is_small = host.num_pairs * q.shape[1] * q.shape[2] <= _ONE_THREAD_PRODUCTS
    # The kernel writes what it refuses into its structure, a copy: another thread may use the plan.
    struct = type(host.struct).from_buffer_copy(host.struct)
    return attend_planned(
        q,
        cache,
        call.keys.block_table,
        host.address,
        host.plan,
        struct,
        options,
        num_threads=1 if is_small else torch.get_num_threads(),
    )
