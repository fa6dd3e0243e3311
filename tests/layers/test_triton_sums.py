"""What ranks on GPUs do with the parts they were sent: sum in order, add to the residual, norm."""

from collections.abc import Callable

import pytest
import torch
from fewer import fewer
from torch import Tensor
from triton_layer_cases import INTERPRETED, assert_as_good_as_torch, everywhere, plain_norm, random

from octavo.kernels.device import power_of_two
from octavo.parallel import shared_memory


@everywhere
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_parts_are_summed_in_float32_in_the_order_of_ranks(
    device: str, dtype: torch.dtype, num_ranks: int, size: int
) -> None:
    from triton_sum_kernel import sum_and_norm_kernel

    rows = 3
    # One rank's part outweighs the others': an order other than that of ranks gives other bits.
    scales = torch.logspace(-3, 3, num_ranks, dtype=torch.float32).roll(1)
    slots = random(num_ranks, rows, size, device=device, dtype=torch.float32, seed=size)
    slots = (slots * scales.to(device)[:, None, None]).to(dtype)
    residual = random(rows, size, device=device, dtype=dtype, seed=1)
    weight = random(size, device=device, seed=2)
    out = torch.empty_like(residual)
    total = slots[0].float()
    for part in slots[1:]:
        total = total + part.float()
    expected = (residual.float() + total.to(dtype).float()).to(dtype)
    sum_and_norm_kernel[(rows,)](
        slots, residual, weight, out, size, 1e-6, SLOT=rows * size, WORLD=num_ranks, BLOCK=power_of_two(size)
    )
    assert torch.equal(residual, expected)
    exact = plain_norm(expected.double(), weight, 1e-6)
    assert_as_good_as_torch(out, plain_norm(expected, weight, 1e-6), exact)


class Block:
    """One rank's SharedMemory, in a process that plays all ranks."""

    def __init__(self, rank: int, blocks: list[Tensor]) -> None:
        self.rank, self.size, self.blocks = rank, len(blocks), blocks
        self.table = torch.tensor([*(block.data_ptr() for block in blocks), 0])
        self.count = torch.zeros(shared_memory.MAX_PROGRAMS, dtype=torch.int32)
        self.one_shot_bytes = shared_memory.HALF_BYTES // self.size


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> list[Block]:
    """Of all ranks, whose kernels do not wait for one another."""
    from triton_sum_kernel import do_not_wait

    for module in ("octavo.parallel.triton.sums", "octavo.parallel.triton.sum_norm"):
        monkeypatch.setattr(f"{module}.barrier", do_not_wait)
    blocks = [torch.zeros(shared_memory.SHARED_BYTES, dtype=torch.uint8) for _ in range(num_ranks)]
    return [Block(rank, blocks) for rank in range(num_ranks)]


def play(
    run: Callable[[Block, Tensor], object], memories: list[Block], parts: Tensor, barriers: int
) -> list[Tensor]:
    """Run each rank's kernel until all have come to each barrier: once more than there are barriers."""
    for _ in range(barriers + 1):
        for memory in memories:
            memory.count.zero_()
        found = [part.clone() for part in parts]
        for memory, part in zip(memories, found, strict=True):
            run(memory, part)
    return found


@pytest.mark.skipif(not INTERPRETED, reason="one process plays all ranks")
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("way", ["sum_one_shot", "sum_two_shot"])
@fewer("size", [1, 30, 12345, 2049])
def test_every_rank_gets_the_sum(memories: list[Block], way: str, num_ranks: int, size: int) -> None:
    from octavo.parallel.triton import sums

    parts = random(num_ranks, size, device="cpu", dtype=torch.float16)
    barriers = 1 if way == "sum_one_shot" else 2
    found = play(lambda memory, part: getattr(sums, way)(part, memory), memories, parts, barriers)
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    for memory, total in zip(memories, found, strict=True):
        assert torch.equal(total, expected.half())
        assert memory.count.eq(1).all()


@pytest.mark.skipif(not INTERPRETED, reason="one process plays all ranks")
@pytest.mark.parametrize("num_ranks", [2])
@pytest.mark.parametrize("rows", [1, 9])
def test_every_rank_gets_the_sum_and_its_norm(
    memories: list[Block], num_ranks: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine rows are more than there are programs."""
    from octavo.kernels.rms_norm import rms_norm
    from octavo.parallel.triton.sum_norm import sum_rms_norm

    monkeypatch.setattr("octavo.parallel.triton.sum_norm.MAX_PROGRAMS", 4)
    size = 24
    parts = random(num_ranks, rows, size, device="cpu")
    residual, weight = random(rows, size, device="cpu", seed=1), random(size, device="cpu", seed=2)
    normed: dict[int, Tensor] = {}
    streams: dict[int, Tensor] = {}

    def run(memory: Block, part: Tensor) -> None:
        streams[memory.rank] = residual.clone()
        normed[memory.rank] = sum_rms_norm(streams[memory.rank], part, weight, 1e-6, memory)

    play(run, memories, parts, barriers=1)
    expected = rms_norm(residual, weight, 1e-6, delta=parts[0] + parts[1])
    for memory in memories:
        assert torch.equal(streams[memory.rank], residual)
        assert torch.equal(normed[memory.rank], expected)
        assert memory.count.eq(1).all()
