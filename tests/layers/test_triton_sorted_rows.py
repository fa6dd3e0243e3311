"""Rows of x in the order of their experts, and the list of their tiles, in Triton."""

import pytest
import torch
from triton_layer_cases import PLACES, poisoned_memory, random


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("skewed", [False, True])
def test_rows_are_sorted_and_every_one_is_in_a_tile(
    device: str, dtype: torch.dtype, rows: int, skewed: bool
) -> None:
    """Of pairs of experts elsewhere there is none."""
    from octavo.gemm.hopper.mxfp4.sorted_rows import sort_rows
    from octavo.gemm.portable.experts.sort_pairs import sort_pairs

    num_experts, num_tokens = 5, 70
    generator = torch.Generator().manual_seed(0)
    experts = torch.randint(num_experts + 1, (num_tokens, 3), generator=generator, dtype=torch.int32)
    if skewed:
        # Everybody's first choice is expert 2; nobody chooses 3 and 4.
        experts[:, 0], experts[:, 1:] = 2, experts[:, 1:].clamp(max=1)
    x = random(num_tokens, 40, device=device, dtype=dtype, seed=1)[:, :36]
    by_expert = sort_pairs(experts.to(device), num_experts, 1)
    with poisoned_memory():
        sorted_x, tiles = sort_rows(x, by_expert, rows)
    number = int(tiles[0, 0])
    assert number < len(tiles)
    starts, found = by_expert.starts.tolist(), []
    for expert, first, end, _ in tiles[1 : number + 1].tolist():
        assert starts[expert] <= first < end == starts[expert + 1]
        assert (first - starts[expert]) % rows == 0
        for row in range(first, min(first + rows, end)):
            pair = int(by_expert.pairs[row])
            assert experts.view(-1)[pair] == expert
            assert torch.equal(sorted_x[row], x[pair // 3])
            found.append(pair)
    assert sorted(found) == (experts.view(-1) < num_experts).nonzero().flatten().tolist()
