import pytest
import torch

from octavo.attention import available_impls
from octavo.gemm.cpu.compiled_norm import unsupported_reason
from octavo.layers import HeadRMSNorm, RMSNorm


def oracle(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("size", [1, 37, 576])
def test_rms_norm_equals_the_definition(scale: float, size: int) -> None:
    x, weight = scale * torch.randn(5, size), torch.randn(size)
    got = RMSNorm(weight, 1e-5)(x)
    torch.testing.assert_close(got.double(), oracle(x, weight, 1e-5), rtol=2e-6, atol=1e-9)


def test_rms_norm_of_zeros_is_zero_and_leaves_its_input_alone() -> None:
    x = torch.zeros(2, 8)
    assert RMSNorm(torch.ones(8), 1e-6)(x).eq(0).all()
    x = torch.randn(2, 8)
    before = x.clone()
    RMSNorm(torch.randn(8), 1e-6)(x)
    assert x.equal(before)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_half_precision_is_normalised_accurately(weight_dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(64).to(weight_dtype)
    got = RMSNorm(weight, 1e-6)(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), oracle(x, weight, 1e-6), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_norm_works_in_place_on_a_view_with_a_weight_per_head(dtype: torch.dtype) -> None:
    heads = torch.randn(3, 6, 8).to(dtype)
    before, weight = heads.clone(), torch.randn(4, 8)
    HeadRMSNorm(weight, 1e-6).apply_(heads[:, :4])
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(
        heads[:, :4].double(), oracle(before[:, :4], weight, 1e-6), rtol=tolerance, atol=tolerance
    )
    assert heads[:, 4:].equal(before[:, 4:])


def test_the_layers_in_c_compile_wherever_attention_does() -> None:
    """Trap: only attention says that it cannot compile; layers that cannot alone would be slow in silence."""
    reason = available_impls("cpu", torch.float32)["c"]
    if reason is not None:
        pytest.skip(reason)
    assert unsupported_reason(torch.zeros(1, 4)) is None
