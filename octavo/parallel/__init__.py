"""Tensor parallelism: how dimensions are sharded over ranks, and the collectives."""

from octavo.parallel.connect import connect, expected_sums
from octavo.parallel.gloo import connect_gloo
from octavo.parallel.handle import Collectives, PeerLostError, TensorParallel
from octavo.parallel.shards import HeadShard, shard_blocks, shard_heads, shard_range, shard_whole

__all__ = [
    "Collectives",
    "HeadShard",
    "PeerLostError",
    "TensorParallel",
    "connect",
    "connect_gloo",
    "expected_sums",
    "shard_blocks",
    "shard_heads",
    "shard_range",
    "shard_whole",
]
