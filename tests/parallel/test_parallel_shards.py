from pathlib import Path

import pytest
import torch

from octavo.errors import ConfigError
from octavo.parallel import TensorParallel, connect_gloo, shard_blocks, shard_heads, shard_range


class Recorded:
    """A group of `size` ranks that all hold the same tensors."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(self.size)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        assert tensor.is_contiguous()
        return [tensor + rank for rank in range(self.size)]


def ranks(size: int) -> list[TensorParallel]:
    return [TensorParallel(rank, size, Recorded(size) if size > 1 else None) for rank in range(size)]


def test_a_single_rank_returns_the_very_tensor() -> None:
    tensor, alone = torch.ones(2, 3), TensorParallel()
    assert alone.all_reduce(tensor) is tensor
    assert alone.all_gather_last_dim(tensor) is tensor
    assert connect_gloo(0, 1, Path("never-created")) == alone
    assert not Path("never-created").exists()


def test_gathering_joins_the_last_dimension_in_rank_order() -> None:
    tensor = torch.tensor([[0.0, 10.0], [20.0, 30.0]]).T
    gathered = ranks(2)[0].all_gather_last_dim(tensor)
    assert gathered.tolist() == [[0, 20, 1, 21], [10, 30, 11, 31]]


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (0, 0)])
def test_ranks_out_of_range_are_refused(rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match="rank"):
        TensorParallel(rank, size)


def test_a_group_is_needed_exactly_for_several_ranks() -> None:
    with pytest.raises(ConfigError, match="group"):
        TensorParallel(0, 2)
    with pytest.raises(ConfigError, match="group"):
        TensorParallel(0, 1, Recorded(1))


def test_ranges_are_equal_or_refused() -> None:
    assert [shard_range(6, rank, what="heads") for rank in ranks(3)] == [range(2), range(2, 4), range(4, 6)]
    with pytest.raises(ConfigError, match="4 ranks must divide the model's 6 heads"):
        shard_range(6, ranks(4)[0], what="heads")


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 8), (8, 4), (8, 2), (8, 1), (9, 3)])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 9])
def test_every_query_head_is_held_once_beside_its_own_kv_head(
    num_heads: int, num_kv_heads: int, size: int
) -> None:
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        with pytest.raises(ConfigError, match="heads"):
            shard_heads(num_heads, num_kv_heads, ranks(size)[0])
        return
    shards = [shard_heads(num_heads, num_kv_heads, rank) for rank in ranks(size)]
    assert [head for shard in shards for head in shard.query] == list(range(num_heads))
    for shard in shards:
        local_group = len(shard.query) // len(shard.kv)
        for index, head in enumerate(shard.query):
            assert shard.kv[index // local_group] == head // (num_heads // num_kv_heads)


def test_blocks_are_cut_as_evenly_as_they_go() -> None:
    parts = [shard_blocks(320, 32, rank, what="columns") for rank in ranks(4)]
    assert parts == [range(64), range(64, 160), range(160, 224), range(224, 320)]
    for length in (96, 321):
        with pytest.raises(ConfigError, match=f"4 ranks cannot share the model's {length} columns"):
            shard_blocks(length, 32, ranks(4)[0], what="columns")
