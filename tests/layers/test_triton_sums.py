"""What ranks on GPUs do with the parts they were sent: sum in order, add to the residual, norm."""

import pytest
import torch
from triton_layer_cases import assert_as_good_as_torch, everywhere, plain_norm, random

from octavo.gpu.device import power_of_two


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
