"""Norms and gated activations on a GPU against plain torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton_layer_cases import (
    ACTIVATIONS,
    HAS_GPU,
    INTERPRETED,
    assert_as_good_as_torch,
    everywhere,
    ignores_overflow,
    plain_norm,
    random,
)

from octavo.errors import InvalidArgumentError

pytestmark = ignores_overflow


@pytest.mark.skipif(INTERPRETED or HAS_GPU, reason="the other tests of these files run in this process")
def test_all_layers_in_the_interpreter() -> None:
    files = [str(path) for path in Path(__file__).parent.glob("test_triton_*.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@everywhere
@pytest.mark.parametrize("size", [1, 7, 64, 896, 1000, 4096])
def test_rms_norm(device: str, dtype: torch.dtype, size: int) -> None:
    from octavo.kernels.rms_norm import rms_norm

    # A strided view: rows of a wider tensor.
    x = random(5, size + 3, device=device, dtype=dtype)[:, :size]
    weight = random(size, device=device, seed=1)
    exact = plain_norm(x.double(), weight, 1e-6)
    got = rms_norm(x, weight, 1e-6)
    assert_as_good_as_torch(got, plain_norm(x, weight, 1e-6), exact)


@everywhere
@pytest.mark.parametrize("size", [7, 64, 1000])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_add_rms_norm_updates_the_residual(device: str, dtype: torch.dtype, size: int, scale: float) -> None:
    from octavo.kernels.rms_norm import rms_norm

    x = random(4, size, device=device, dtype=dtype)
    residual = random(4, size + 1, device=device, dtype=dtype, seed=1)[:, 1:]
    before, untouched = residual.clone(), x.clone()
    weight = random(size, device=device, dtype=dtype, seed=2)
    got = rms_norm(residual, weight, 1e-5, delta=x, stream_scale=scale)
    assert torch.equal(residual, before * scale + x)
    assert torch.equal(x, untouched)
    torch.testing.assert_close(got, rms_norm(residual, weight, 1e-5))


@everywhere
def test_norms_of_nothing_and_of_zeros(device: str, dtype: torch.dtype) -> None:
    from octavo.kernels.rms_norm import rms_norm

    weight = torch.ones(8, device=device)
    nothing = torch.empty(0, 8, device=device, dtype=dtype)
    assert rms_norm(nothing, weight, 1e-6).shape == (0, 8)
    assert rms_norm(nothing, weight, 1e-6, delta=nothing).shape == (0, 8)
    zeros = torch.zeros(2, 8, device=device, dtype=dtype)
    assert torch.equal(rms_norm(zeros, weight, 1e-6), zeros)


@everywhere
def test_norms_refuse_what_does_not_fit(device: str, dtype: torch.dtype) -> None:
    from octavo.kernels.rms_norm import rms_norm

    x, weight = torch.zeros(2, 8, device=device, dtype=dtype), torch.ones(8, device=device)
    for bad in (x[:, :7], x.t(), x[None]):
        with pytest.raises(InvalidArgumentError, match="x must be"):
            rms_norm(bad, weight, 1e-6)
    for bad in (x[:1], x.double(), x.t().contiguous().t()):
        with pytest.raises(InvalidArgumentError, match="delta must be"):
            rms_norm(x, weight, 1e-6, delta=bad)


@everywhere
@pytest.mark.parametrize("size", [1, 7, 1023, 1024, 1025, 3072])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_activation(device: str, dtype: torch.dtype, name: str, size: int) -> None:
    from octavo.kernels.activation import gated_activation

    gate_up = (random(3, 2 * size + 5, device=device, dtype=dtype) * 3)[:, : 2 * size]
    gate, up = gate_up.chunk(2, -1)
    activation = ACTIVATIONS[name]
    exact = activation(gate.double()) * up.double()
    assert_as_good_as_torch(gated_activation(gate_up, name), activation(gate) * up, exact)


@everywhere
def test_gated_activation_at_the_extremes(device: str, dtype: torch.dtype) -> None:
    from octavo.kernels.activation import gated_activation

    gate_up = torch.tensor([[-3e4, 3e4, 0.0, 1.0, 1.0, 1.0]], device=device, dtype=dtype)
    for name in ACTIVATIONS:
        assert gated_activation(gate_up, name).tolist() == [[0.0, gate_up[0, 1].item(), 0.0]]
    assert gated_activation(gate_up[:0], "silu").shape == (0, 3)


@everywhere
def test_bounds_of_an_activation_keep_what_is_no_number(device: str, dtype: torch.dtype) -> None:
    from octavo.kernels.activation import gated_activation

    gate_up = torch.tensor([[torch.nan, 1.0, 9.0, 1.0, torch.nan, 9.0]], device=device, dtype=dtype)
    assert gated_activation(gate_up, "clamped_swiglu").isnan().tolist() == [[True, True, False]]


@everywhere
def test_gated_activation_refuses_what_does_not_fit(device: str, dtype: torch.dtype) -> None:
    from octavo.kernels.activation import gated_activation

    with pytest.raises(InvalidArgumentError, match="did you mean 'gelu_tanh'"):
        gated_activation(torch.zeros(1, 2, device=device, dtype=dtype), "gelu_tan")
    with pytest.raises(InvalidArgumentError, match="gate_up must be"):
        gated_activation(torch.zeros(1, 3, device=device, dtype=dtype), "silu")
