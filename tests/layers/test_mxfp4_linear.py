"""Matrices of MXFP4 that are not experts: as integers for GPUs, exactly."""

import torch

from octavo.forms.mxfp4 import MXFP4_DENSE, Mxfp4Weight
from octavo.forms.packed import PackedWeight
from octavo.gemm.make_linear import multiplies
from octavo.gemm.product import Target
from octavo.gemm.table import LAYERS


def random_weight(rows: int, columns: int) -> Mxfp4Weight:
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(110, 125, (rows, columns // 32), dtype=torch.uint8, generator=generator)
    return Mxfp4Weight(values, exponents)


def test_integers_mean_the_same() -> None:
    weight = random_weight(37, 384)
    expected = weight.dequantise()
    assert torch.equal(weight.in_bytes().dequantise(), expected)
    packed = PackedWeight.pack(weight.in_bytes())
    assert torch.equal(packed.dequantise(), expected)
    assert packed.nbytes == MXFP4_DENSE.bytes_on_gpu * 37 * 384  # type: ignore[operator]


def test_a_gpu_multiplies_them_packed() -> None:
    (on_gpu,) = (layer for layer in LAYERS["mxfp4"] if layer.device == "cuda")
    assert on_gpu.form == "packed"
    reason = on_gpu.unsupported_reason(Target(torch.device("cpu"), torch.float32))
    assert "on an NVIDIA GPU" in str(reason)
    assert multiplies("mxfp4", torch.device("cpu"), torch.float16)
