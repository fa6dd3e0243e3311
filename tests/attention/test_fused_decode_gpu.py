"""The kernel for the token of one sequence, or of a few, on a GPU: exact, and among overlapping kernels."""

import pytest
import torch
from fused_decode_cases import AloneCase
from overlaps import check_overlap

from octavo.attention.cache import FLOAT8
from octavo.gemm.gpu_linear import GpuLinear
from octavo.gemm.product import find
from octavo.kernels import launch
from octavo.layers.steps.gpu_step import TritonStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def check(**settings):
    """At most twice the error of the reference in the same dtype, both against float32."""
    case = AloneCase(device="cuda", **settings)
    (out, data), (plain, stored) = case.by_kernel(), case.by_operators()
    exact, exactly_stored = case.by_operators(torch.float32)
    assert out.dtype == plain.dtype
    for got, same_dtype, right in ((out, plain, exact), (data, stored, exactly_stored)):
        assert torch.equal(got.isnan(), same_dtype.isnan())
        error, allowed = ((x.float() - right).nan_to_num().abs().max() for x in (got, same_dtype))
        assert error <= 2 * allowed + 2e-6
    # Pieces are merged in their order, whichever came last.
    for _ in range(3):
        assert torch.equal(case.by_kernel()[0], out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("length", [1, 17, 64, 65, 700, 1025, 20000])
def test_lengths(length, dtype):
    check(length=length, dtype=dtype, heads=(32, 8), head_dim=128)


@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((16, 8), 64), ((9, 3), 64), ((14, 2), 64), ((32, 32), 96), ((24, 1), 80), ((8, 4), 256)],
)
def test_heads(heads, head_dim):
    has_norm = head_dim == 64
    check(length=900, heads=heads, head_dim=head_dim, has_norm=has_norm, dtype=torch.bfloat16)


@pytest.mark.parametrize("block_size", [8, 64])
@pytest.mark.parametrize(
    "settings", [{"window": 128, "has_sinks": True}, {"softcap": 20.0}, {"is_stored": False}]
)
def test_options(settings, block_size):
    for length in (1, 500, 3000):
        check(
            length=length, block_size=block_size, heads=(64, 8), head_dim=64, dtype=torch.bfloat16, **settings
        )


@pytest.mark.parametrize("length", [1, 65, 3000])
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_float8_caches(head_dim, is_scaled, length):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 caches need compute capability 8.9")
    shape = {"heads": (32, 8), "head_dim": head_dim, "dtype": torch.bfloat16, "cache_dtype": FLOAT8}
    case = AloneCase(length, is_scaled=is_scaled, device="cuda", **shape)
    (out, data), (other, stored) = case.by_kernel(), case.by_kernel(alone=False)
    assert torch.equal(data.view(torch.uint8), stored.view(torch.uint8))
    assert (out - other).abs().max() <= 2**-7 * other.abs().max()


@pytest.mark.parametrize(
    "lengths", [(700, 30), (64, 0), (1, 900, 65, 20000), (3, 0, *range(1, 600, 45)), (100,) * 16]
)
@pytest.mark.parametrize(
    "settings",
    [{}, {"window": 128, "has_sinks": True}, {"heads": (4, 4), "head_dim": 64}, {"heads": (16, 2)}],
)
def test_several_sequences(settings, lengths):
    check(length=lengths, dtype=torch.bfloat16, **({"heads": (32, 8), "head_dim": 128} | settings))


class Chain:
    """Layers of attention between a projection of its heads and one back to the residual stream."""

    def __init__(self, num_heads, lengths):
        # Of eight sequences, as many kv heads as leave each of them four programs.
        heads = num_heads, 4 if lengths == (64,) * 8 else 8
        self.case = AloneCase(lengths, heads=heads, head_dim=128, dtype=torch.bfloat16, device="cuda")
        width, size = self.case.qkv.shape[1], num_heads * 128
        torch.manual_seed(0)
        self.weights = [
            (torch.randn(width, 1024, device="cuda") / 32, torch.randn(1024, size, device="cuda") / size**0.5)
            for _ in range(12)
        ]
        self.weights = [(qkv.bfloat16(), out.bfloat16()) for qkv, out in self.weights]
        self.hidden = torch.empty(len(self.case.qkv), 1024, dtype=torch.bfloat16, device="cuda")
        self.start = torch.randn_like(self.hidden)
        self.rotations = torch.stack((self.case.angles.cos(), self.case.angles.sin()))
        weight = self.weights[0][0]
        product = find(GpuLinear(weight).products, self.hidden, weight)
        assert product.name in ("gemv", "skinny", "hopper")
        self.product = product.run

    def run(self):
        self.hidden.copy_(self.start)
        self.case.cache.data.copy_(self.case.old)
        step = TritonStep(self.case.cache, self.case.metadata, num_heads=self.case.heads[0])
        assert step._is_fused
        for qkv, out in self.weights:
            attended = step.attend(self.product(self.hidden, qkv), self.rotations, self.case.options)
            self.product(attended, out, residual=self.hidden)


@pytest.mark.parametrize("lengths", [700, (700, 30, 0, 2000), (64,) * 8], ids=str)
@pytest.mark.parametrize("num_heads", [16, 32])
def test_layers_that_overlap_give_the_same_bits_in_and_out_of_graphs(num_heads, lengths, monkeypatch):
    """As in a decoder; with 16 heads the next kernel comes at once, with 32 late."""
    chain = Chain(num_heads, lengths)
    with monkeypatch.context() as patch:
        patch.setattr(launch, "OVERLAP", False)
        chain.run()
    stored = chain.case.cache.data.view(torch.int16).clone()
    check_overlap(chain, monkeypatch)
    assert torch.equal(chain.case.cache.data.view(torch.int16), stored)
