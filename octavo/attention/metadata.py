"""What an attention call needs to know about the step, passed explicitly."""

from dataclasses import dataclass

from torch import Tensor

from octavo.attention.plan.device_forest import DeviceForest
from octavo.attention.plan.host_plan import ForestPlan


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's ragged batch of S sequences and T query tokens over a paged KV cache.

        |---- computed before ----|-- query_len --|
        |------------------ seq_len --------------|

    Attributes:
        cu_seqlens_q: [S + 1] int32, cumulative query lengths; tokens of sequence s are
            cu_seqlens_q[s] : cu_seqlens_q[s + 1].
        seq_lens: [S] int32, tokens in the cache after this step's store, the query tokens included.
        positions: [T] int32, absolute position of each query token in its sequence.
        slot_mapping: [T] int32 or int64, cache slot (block id * block_size + offset) where each query
            token's key and value go; -1 writes nothing.
        block_table: [S, max_blocks] int32, block ids of each sequence; entries past its last block
            are never read.
        max_query_len: longest query, in tokens.
        max_seq_len: longest seq_len, in tokens.
        plan: work list over the prefix forest (host arrays), or None: each sequence by itself. GPU kernels do
            not use it.
        forest: shared prefixes for GPU kernels (device arrays), whose plan must be of this batch, or None.
            Others do not use it: what is shared changes the time a step takes, not its results.
        is_fresh: there is one sequence, no token of it is in the cache yet, and token 0 is its first; tokens
            behind its last belong to none.
    """

    cu_seqlens_q: Tensor
    seq_lens: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    max_query_len: int
    max_seq_len: int
    plan: ForestPlan | None = None
    forest: DeviceForest | None = None
    is_fresh: bool = False
