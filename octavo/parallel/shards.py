"""Sharding: the part of a dimension that a rank holds."""

from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.parallel.handle import TensorParallel


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The attention heads of one rank.

    Attributes:
        query: range of query heads.
        kv: range of kv heads; several ranks may hold the same head.
    """

    query: range
    kv: range


def shard_range(length: int, parallel: TensorParallel, *, what: str) -> range:
    """Return this rank's contiguous part of `length` items. All parts have the same size.

    Raises:
        ConfigError: the ranks do not divide `length`; the message names `what`.
    """
    if length % parallel.size:
        raise ConfigError(f"{parallel.size} ranks must divide the model's {length} {what}; use fewer ranks")
    share = length // parallel.size
    return range(parallel.rank * share, (parallel.rank + 1) * share)


def shard_whole(number: int, parallel: TensorParallel, *, what: str) -> range:
    """Return this rank's consecutive part of `number` things that are not cut, as even as that is.

    Raises:
        ConfigError: there are fewer things than ranks; the message names `what`.
    """
    if number < parallel.size:
        raise ConfigError(
            f"{parallel.size} ranks cannot share the model's {number} {what} whole; use fewer ranks"
        )
    return _as_even_as_possible(number, parallel)


def shard_blocks(length: int, block: int, parallel: TensorParallel, *, what: str) -> range:
    """Return this rank's consecutive part of `length` things, cut between blocks of them, as even as that is.

        10 blocks of 32 things, 4 ranks:    0 to 64, 64 to 160, 160 to 224, 224 to 320

    Raises:
        ConfigError: there are fewer blocks than ranks; the message names `what`.
    """
    num_blocks, size = length // block, parallel.size
    if length % block or num_blocks < size:
        raise ConfigError(
            f"{size} ranks cannot share the model's {length} {what}: they are cut into blocks of {block}; "
            "use fewer ranks"
        )
    blocks = _as_even_as_possible(num_blocks, parallel)
    return range(blocks.start * block, blocks.stop * block)


def shard_heads(num_heads: int, num_kv_heads: int, parallel: TensorParallel) -> HeadShard:
    """Return this rank's query heads and the kv heads that they read.

        4 query heads, 2 kv heads, 4 ranks:   rank    0    1    2    3
                                              query   0    1    2    3
                                              kv      0    0    1    1      (replicated)

    Args:
        num_heads: query heads of the model.
        num_kv_heads: kv heads of the model, a divisor of num_heads.
        parallel: this rank.

    Raises:
        ConfigError: the ranks do not divide the query heads, or neither the number of ranks nor that of
            kv heads divides the other.
    """
    query = shard_range(num_heads, parallel, what="attention heads")
    if num_kv_heads % parallel.size == 0:
        return HeadShard(query, shard_range(num_kv_heads, parallel, what="kv heads"))
    if parallel.size % num_kv_heads:
        raise ConfigError(
            f"{parallel.size} ranks must divide the model's {num_kv_heads} kv heads or be a multiple of them"
        )
    kv_head = query.start // (num_heads // num_kv_heads)
    return HeadShard(query, range(kv_head, kv_head + 1))


def _as_even_as_possible(number: int, parallel: TensorParallel) -> range:
    start, stop = (number * rank // parallel.size for rank in (parallel.rank, parallel.rank + 1))
    return range(start, stop)
