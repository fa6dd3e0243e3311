"""Tilings of the portable products fit GPUs whose programs have less shared memory than Hopper's."""

from types import SimpleNamespace

import pytest
import torch

from octavo.gemm.portable.experts import expert_tiling
from octavo.gemm.portable.packed.packed_tiling import medium_tiling_for

# Kibibytes of a program: RTX cards and L40S, A100, Hopper.
RTX, AMPERE, HOPPER = 99 * 1024, 163 * 1024, 227 * 1024


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets a GPU's generation and shared memory."""

    def choose(generation: int, num_bytes: int) -> None:
        monkeypatch.setattr(expert_tiling, "nvidia_generation", lambda device: generation)
        monkeypatch.setattr(expert_tiling, "shared_bytes", lambda device: num_bytes)

    return choose


def float_experts(itemsize: int):
    dtype = torch.float8_e4m3fn if itemsize == 1 else torch.bfloat16
    return SimpleNamespace(values=torch.empty(4, 256, 512, dtype=dtype, device="meta"))


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("generation", "num_bytes"), [(8, RTX), (8, AMPERE), (12, RTX), (9, HOPPER)])
def test_grouped_experts_fit(on_gpu, generation: int, num_bytes: int, is_gated: bool, itemsize: int) -> None:
    on_gpu(generation, num_bytes)
    for per_expert in (1, 20, 40):
        tiling = expert_tiling.float_grouped_tiling(float_experts(itemsize), per_expert, is_gated=is_gated)
        columns = tiling.columns * (2 if is_gated else 1)
        taken = tiling.num_stages * tiling.depth * (2 * tiling.rows + itemsize * columns)
        assert taken < num_bytes
        assert tiling.num_stages >= 2


def test_hopper_keeps_its_measured_tilings(on_gpu) -> None:
    on_gpu(9, HOPPER)
    for itemsize in (1, 2):
        tiling = expert_tiling.float_grouped_tiling(float_experts(itemsize), 20, is_gated=True)
        assert tiling.num_stages == 6
    half_planes = SimpleNamespace(group=16, words=torch.empty(0, device="meta"))
    assert expert_tiling.packed_grouped_tiling(half_planes, 1, is_gated=True).num_stages == 3
    assert medium_tiling_for(128, 4096, HOPPER) == medium_tiling_for(128, 4096, 1 << 20)


def test_packed_weights_fit(on_gpu) -> None:
    on_gpu(8, AMPERE)
    half_planes = SimpleNamespace(group=16, words=torch.empty(0, device="meta"))
    assert expert_tiling.packed_grouped_tiling(half_planes, 1, is_gated=True).num_stages == 2
    for rows in (17, 64, 128, 256):
        tiling = medium_tiling_for(rows, 4096, RTX)
        # Columns of x and words that stages ahead hold.
        assert (tiling.num_stages - 1) * (512 * tiling.rows + 16 * 1024) <= RTX
