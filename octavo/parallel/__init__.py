"""Tensor parallelism: which part of the network a rank holds, and the handle that sums and gathers."""

from octavo.parallel.gloo import connect_gloo
from octavo.parallel.handle import Collectives, TensorParallel
from octavo.parallel.shards import HeadShard, shard_heads, shard_range

__all__ = ["Collectives", "HeadShard", "TensorParallel", "connect_gloo", "shard_heads", "shard_range"]
