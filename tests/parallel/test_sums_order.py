"""Sums over ranks have one order: a row's bits do not depend on how many rows are summed beside it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.parallel import TensorParallel, connect_gloo, nccl
from octavo.parallel.all_reduce import MAX_RANKS, choose_algorithm, one_shot_bytes, two_shot_bytes
from octavo.parallel.shared_memory import HALF_BYTES

WIDTH = 48
NUM_ROWS = (1, 2, 3, 7, 40)


def rows_of(rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    # Values of very different sizes: another order of sums gives other bits.
    scale = 10.0 ** torch.randint(-4, 5, (max(NUM_ROWS), WIDTH), generator=generator)
    return (scale * torch.randn(max(NUM_ROWS), WIDTH, generator=generator)).to(dtype)


def on_ranks(size: int, folder: Path, act: Callable[[TensorParallel], Any]) -> list[Any]:
    """Run a function on ranks that are threads; return what it returned on each."""

    def run(rank: int) -> Any:
        return act(connect_gloo(rank, size, folder / "rendezvous"))

    with ThreadPoolExecutor(size) as threads:
        return [*threads.map(run, range(size))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_same_bits_beside_any_others(dtype: torch.dtype, tmp_path: Path) -> None:
    def sums(parallel: TensorParallel) -> list[Tensor]:
        rows = rows_of(parallel.rank, dtype)
        return [parallel.all_reduce(rows[:num].clone()) for num in NUM_ROWS]

    found = on_ranks(3, tmp_path, sums)
    parts = [rows_of(rank, dtype).float() for rank in range(3)]
    expected = (parts[0] + parts[1] + parts[2]).to(dtype)
    for of_a_rank in found:
        for num, rows in zip(NUM_ROWS, of_a_rank, strict=True):
            assert torch.equal(rows, expected[:num])


def test_large_sums_in_order_are_cut_and_never_left_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.parallel.triton import sums

    cut: list[int] = []
    monkeypatch.setattr(sums, "sum_two_shot", lambda tensor, memory: cut.append(tensor.nbytes))
    group = nccl.NcclCollectives(None, 2, in_order=True)
    group._memory = object()  # type: ignore[assignment]
    tensor = torch.zeros(2**24 + 512, 1, dtype=torch.bfloat16)
    assert choose_algorithm(tensor.nbytes, 2) == "nccl"
    assert group.all_reduce(tensor) is tensor
    assert cut == [2**24, 2**24, 1024]
    # One kernel for steps of any size.
    assert group.memory_for(tensor[:1]) is None


def test_ranks_that_share_no_memory_cannot_sum_in_order() -> None:
    group = nccl.NcclCollectives(None, 2, in_order=True)
    with pytest.raises(ConfigError, match=r"deterministic=True over several ranks needs GPUs that reach"):
        group.check_order()


@pytest.mark.parametrize("size", range(2, MAX_RANKS + 1))
def test_parts_of_all_ranks_fit_their_memory(size: int) -> None:
    """A rank's part is a multiple of 16 values; what is sent and the sums are side by side in one half."""
    assert one_shot_bytes(size) <= HALF_BYTES // size
    for itemsize in (2, 4):
        num_values = two_shot_bytes(size) // itemsize
        part = -(-num_values // (size * 16)) * 16
        assert 2 * part * size * itemsize <= HALF_BYTES
        assert choose_algorithm(num_values * itemsize, size) != "nccl"
