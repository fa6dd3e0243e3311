"""The GEMM of 5 to 256 rows on a Hopper GPU: the shapes of decoders, all epilogues, kernels that overlap."""

import pytest
import torch
from chosen_products import product_name
from overlap_cases import random
from overlaps import check_overlap
from torch import Tensor
from triton_layer_cases import (
    ACTIVATIONS,
    EPS,
    HAS_GPU,
    assert_as_good_as_torch,
    plain_linear,
    poisoned_memory,
    with_nan_behind,
)

from octavo.gemm.gpu_linear import GpuLinear
from octavo.gemm.hopper.floats import dense_gemm as hopper_linear
from octavo.gemm.hopper.floats.dense_gemm_tiling import HopperTiling
from octavo.gemm.linear import PlainLinear
from octavo.layers import RMSNorm
from octavo.layers.block import BlockInput, BlockOutput
from octavo.parallel import TensorParallel

IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]


def check(x: Tensor, weight: Tensor, tiling: HopperTiling | None = None, **options) -> None:
    """Run the kernel on poisoned memory and hold it to twice the error of plain torch."""
    residual = options.get("residual")
    given = options | ({} if residual is None else {"residual": residual.clone()})
    with poisoned_memory():
        got = hopper_linear.hopper_linear(x, weight, tiling=tiling, **given)
    assert (got is given.get("residual")) == (residual is not None)
    assert_as_good_as_torch(
        got, plain_linear(x, weight, **options), plain_linear(x.double(), weight, **options)
    )


@pytest.mark.parametrize("num_rows", [3, 5, 8, 16, 31, 37, 64, 100, 129, 192, 255, 256])
@pytest.mark.parametrize(("num_columns", "size"), [(1024, 3072), (6144, 1024), (4096, 12288), (1008, 64)])
def test_shapes_of_decoders(num_columns: int, size: int, num_rows: int) -> None:
    torch.manual_seed(num_rows)
    x, weight = random(num_rows, size), random(num_columns, size, scale=size**-0.5)
    check(x, weight)
    check(x, weight, residual=random(num_rows, num_columns))
    check(x, weight, activation="silu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("num_rows", [8, 70])
def test_bias_and_activation(num_rows: int, activation: str | None, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    x, weight = random(num_rows, 320, dtype=dtype), random(176, 320, dtype=dtype, scale=0.05)
    check(x, weight, bias=random(176, dtype=dtype), activation=activation)


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
@pytest.mark.parametrize("columns", [8, 16, 32, 64])
@pytest.mark.parametrize("stages", [(2, 2), (5, 3)])
def test_tilings(rows: int, columns: int, stages: tuple[int, int]) -> None:
    x, weight = random(200, 704), random(112, 704, scale=0.04)
    for depth in (64, 128):
        tiling = HopperTiling(rows, columns, depth, *stages)
        check(x, weight, tiling, residual=random(200, 112))
        check(x, weight, tiling, activation="silu")


@pytest.mark.parametrize("num_rows", [5, 12, 33, 70])
def test_what_lies_behind_the_last_row(num_rows: int) -> None:
    x, weight = with_nan_behind(random(num_rows, 320)), random(176, 320, scale=0.05)
    check(x, weight, residual=random(num_rows, 176))
    check(x, weight, activation="silu")


def test_strides() -> None:
    x, weight = random(40, 384)[:, 64:320], random(64, 256, scale=0.06)
    check(x, weight, residual=random(40, 80)[:, 8:72])


def test_rows_do_not_touch_each_other() -> None:
    x, weight = random(11, 512), random(64, 512)
    # The kernel may read weights before the one in front has ended.
    torch.cuda.synchronize()
    expected = hopper_linear.hopper_linear(x, weight)
    x[5] = torch.nan
    got = hopper_linear.hopper_linear(x, weight)
    assert got[5].isnan().all()
    assert torch.equal(got[[*range(5), *range(6, 11)]], expected[[*range(5), *range(6, 11)]])


def test_what_it_is_used_for() -> None:
    weight = random(1024, 512)
    assert product_name(random(16, 512), weight) == "hopper"
    assert product_name(random(2, 512), weight) == "hopper"
    assert product_name(random(1, 512), weight) == "gemv"
    assert product_name(random(256, 512), weight) == "hopper"
    assert product_name(random(257, 512), weight) == "plain"
    assert product_name(random(129, 512), random(2064, 512)) == "plain"
    assert product_name(random(65, 4096), random(64, 4096)) == "plain"
    assert product_name(random(16, 512), random(65536, 512)) == "hopper"
    assert product_name(random(65, 512), random(65536, 512)) == "plain"


@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("num_rows", [5, 64, 256])
def test_blocks_use_it(num_rows: int, has_delta: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = hopper_linear.hopper_linear
    monkeypatch.setattr(hopper_linear, "hopper_linear", lambda *a, **k: calls.append(1) or real(*a, **k))
    gate_up = PlainLinear(random(384, 128, scale=0.1), random(384))
    down = PlainLinear(random(128, 192, scale=0.1), random(128))
    norm = RMSNorm(random(128), EPS)
    start, delta = random(num_rows, 128), random(num_rows, 128) if has_delta else None
    results = []
    for linear in (lambda x: GpuLinear(x.weight, x.bias), lambda x: x):
        hidden = start.clone()
        inner = BlockInput(norm, linear(gate_up), "silu")(hidden, delta)
        added = BlockOutput(linear(down), None, TensorParallel())(inner, hidden)
        results.append(hidden if added is None else hidden + added)
    assert len(calls) == 2
    torch.testing.assert_close(*results, rtol=0.03, atol=0.06)


class Layers:
    """A chain of feed-forwards over one residual stream, each of whose kernels reads the last one's."""

    def __init__(self, num_rows: int, num_layers: int = 12) -> None:
        self.start = random(num_rows, 1024)
        self.hidden = self.start.clone()
        self.layers = [
            (random(1024), random(6144, 1024, scale=0.03), random(1024, 3072, scale=0.02))
            for _ in range(num_layers)
        ]

    def run(self) -> None:
        """A copy, then norms and products, with an ordinary kernel in between in every layer."""
        from octavo.kernels.rms_norm import rms_norm

        self.hidden.copy_(self.start)
        for norm_weight, gate_up, down in self.layers:
            for factor in (0.5, None):
                inner = hopper_linear.hopper_linear(
                    rms_norm(self.hidden, norm_weight, EPS), gate_up, activation="silu"
                )
                inner = inner if factor is None else inner.mul_(factor)
                hopper_linear.hopper_linear(inner, down, residual=self.hidden)


@pytest.mark.parametrize("num_rows", [5, 16, 64, 200])
def test_overlapping_kernels_give_the_same_bits_in_and_out_of_graphs(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_overlap(Layers(num_rows), monkeypatch)
