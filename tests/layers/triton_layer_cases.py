"""What the tests of the fused GPU layers share: where they run, data, and the bound on errors.

Natively on a GPU, else in Triton's interpreter, which has to be chosen before triton is first imported: in
a process of its own, that a test starts. By hand: TRITON_INTERPRET=1 python -m pytest tests/layers -k triton
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from octavo.kernels.padded_rows import new_rows

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
# The interpreter computes with NumPy, which warns where a GPU just returns inf: exp(-gate) is meant to.
ignores_overflow = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import interpreted_float8

    interpreted_float8.patch()
HAS_GPU = torch.cuda.is_available()
PLACES = (
    [pytest.param("cpu", dtype) for dtype in (torch.float32, torch.float16)]
    if INTERPRETED
    else [
        pytest.param(
            "cuda", dtype, marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")]
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]
)
everywhere = pytest.mark.parametrize(("device", "dtype"), PLACES)
ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_tanh": lambda gate: gelu(gate, approximate="tanh")}
EPS = 1e-6


def random(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every torch.empty holds NaN: what a kernel forgets to write shows."""
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


def assert_as_good_as_torch(got: Tensor, same_dtype: Tensor, exact: Tensor) -> None:
    """Demand err(kernel) <= 2 err(torch in the same dtype) + eps, both against float64.

    eps: a few units in the last place of float32 of the largest value.
    """
    assert got.dtype == same_dtype.dtype
    assert got.shape == exact.shape
    error = (got.double() - exact).abs().max().item()
    allowed = 2 * (same_dtype.double() - exact).abs().max().item() + 1e-6 * (1 + exact.abs().max().item())
    assert error <= allowed


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[T, C] in its own dtype."""
    return x * torch.rsqrt(x.square().mean(-1, True) + eps) * weight.to(x.dtype)


def plain_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The specification, each step in the dtype of x."""
    if norm_weight is not None:
        x = plain_norm(x, norm_weight, EPS)
    out = x @ weight.to(x.dtype).T
    if bias is not None:
        out = out + bias.to(x.dtype)
    if activation is not None:
        gate, up = out.chunk(2, -1)
        out = ACTIVATIONS[activation](gate) * up
    return out if residual is None else residual + out


def with_nan_behind(x: Tensor) -> Tensor:
    """Return rows like x whose storage has room behind them, full of NaN in any dtype of floats."""
    rows = new_rows(x, *x.shape)
    torch.empty(0, dtype=torch.uint8, device=x.device).set_(rows.untyped_storage()).fill_(0xFF)
    return rows.copy_(x)
