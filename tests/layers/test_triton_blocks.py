"""Block inputs and outputs: fused ones give what plain ones give, and fuse only what may be fused."""

import pytest
import torch
from torch import Tensor
from triton_layer_cases import everywhere, ignores_overflow, random

from octavo.gemm.gpu_linear import GpuLinear
from octavo.gemm.linear import PlainLinear, UnfusedLinear
from octavo.gemm.make_linear import make_linear
from octavo.gemm.portable.skinny_tiling import MAX_ROWS
from octavo.layers import RMSNorm
from octavo.layers.block import BlockInput, BlockOutput
from octavo.parallel import TensorParallel

pytestmark = ignores_overflow
HIDDEN, INNER = 40, 24
ROWS = [1, MAX_ROWS, MAX_ROWS + 1]


class Doubling:
    """Two ranks that hold the same."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(2)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        raise NotImplementedError


TWO_RANKS = TensorParallel(0, 2, Doubling())


def linear(out_size: int, in_size: int, device: str, dtype: torch.dtype) -> PlainLinear:
    weight = random(out_size, in_size, device=device, dtype=dtype, seed=1) / 8
    return PlainLinear(weight, random(out_size, device=device, dtype=dtype, seed=2))


def fusing(out_size: int, in_size: int, device: str, dtype: torch.dtype) -> GpuLinear:
    plain = linear(out_size, in_size, device, dtype)
    return GpuLinear(plain.weight, plain.bias)


def norm(device: str) -> RMSNorm:
    return RMSNorm(random(HIDDEN, device=device, seed=3), 1e-6)


def assert_near(got: Tensor, expected: Tensor) -> None:
    precision = 1e-5 if got.dtype == torch.float32 else 8 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, expected, rtol=precision, atol=precision)


@everywhere
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("num_rows", ROWS)
def test_input(
    device: str, dtype: torch.dtype, num_rows: int, has_delta: bool, activation: str | None
) -> None:
    plain = BlockInput(norm(device), linear(INNER, HIDDEN, device, dtype), activation)
    fused = BlockInput(norm(device), fusing(INNER, HIDDEN, device, dtype), activation)
    hidden = random(num_rows, HIDDEN, device=device, dtype=dtype, seed=4)
    delta = random(num_rows, HIDDEN, device=device, dtype=dtype, seed=5) if has_delta else None
    streams = [hidden.clone(), hidden.clone()]
    assert_near(fused(streams[0], delta), plain(streams[1], delta))
    assert torch.equal(streams[0], streams[1])
    assert torch.equal(streams[0], hidden) != has_delta


@everywhere
@pytest.mark.parametrize("num_rows", [1, 5])
def test_float16_input_beyond_its_range_once_weighted(device: str, dtype: torch.dtype, num_rows: int) -> None:
    large = RMSNorm(torch.full((HIDDEN,), 30.0, device=device), 1e-6)
    plain = BlockInput(large, linear(INNER, HIDDEN, device, torch.float16))
    hidden = random(num_rows, HIDDEN, device=device, dtype=torch.float16) * 5000
    got = BlockInput(large, fusing(INNER, HIDDEN, device, torch.float16))(hidden)
    assert got.isfinite().all()
    torch.testing.assert_close(got, plain(hidden), rtol=0.01, atol=0.5)


@everywhere
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("parallel", [TensorParallel(), TWO_RANKS])
@pytest.mark.parametrize("num_rows", ROWS)
def test_output(
    device: str, dtype: torch.dtype, num_rows: int, parallel: TensorParallel, has_norm: bool
) -> None:
    post_norm = norm(device) if has_norm else None
    plain = BlockOutput(linear(HIDDEN, INNER, device, dtype), post_norm, parallel)
    fused = BlockOutput(fusing(HIDDEN, INNER, device, dtype), post_norm, parallel)
    x = random(num_rows, INNER, device=device, dtype=dtype, seed=4)
    hidden = random(num_rows, HIDDEN, device=device, dtype=dtype, seed=5)
    stream = hidden.clone()
    delta = fused(x, stream)
    adds_itself = num_rows <= MAX_ROWS and not has_norm and parallel.size == 1
    assert (delta is None) == adds_itself
    assert torch.equal(stream, hidden) != adds_itself
    assert_near(stream if delta is None else stream + delta, hidden + plain(x, hidden))


def test_a_cpu_gets_plain_blocks() -> None:
    for weight in (torch.ones(4, 4), torch.ones(4, 4).half()):
        assert isinstance(make_linear(weight), UnfusedLinear)
