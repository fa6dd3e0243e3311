"""What the tests of packed experts share: random experts, packed, and the specification over them."""

import torch
from grouped_cases import packed, random_blocks
from torch import Tensor

from octavo.forms.packed_experts import PackedExpertWeight
from octavo.gemm.linear import PlainLinear
from octavo.layers.experts import ListedExperts


def packed_experts(
    number: int, rows: int, columns: int, device: str, *, bits: int, group: int, parts: int, ordered: bool
) -> PackedExpertWeight:
    """Experts [E, rows, columns] of so many equal parts of rows, packed one by one."""
    weights = [
        [
            packed(random_blocks(rows // parts, columns, bits=bits, group=group, seed=10 * e + part), device)
            for part in range(parts)
        ]
        for e in range(number)
    ]
    orders = [torch.randperm(columns, generator=torch.Generator().manual_seed(e)) for e in range(number)]
    first = weights[0][0]
    return PackedExpertWeight(
        bits,
        columns,
        first.group,
        torch.stack([torch.cat([part.words for part in each]) for each in weights]),
        torch.stack([torch.cat([part.pairs for part in each], 1) for each in weights]),
        torch.tensor([[part.factor for part in each] for each in weights], device=device),
        torch.stack(orders).int().to(device) if ordered else None,
    )


def listed(gate_up: PackedExpertWeight, down: PackedExpertWeight, dtype: torch.dtype) -> ListedExperts:
    """The same experts as floats of a dtype."""
    linears = [[PlainLinear(each.to(dtype), None) for each in in_order(weight)] for weight in (gate_up, down)]
    return ListedExperts(linears[0], linears[1], "silu")


def in_order(weight: PackedExpertWeight) -> Tensor:
    """The weights [E, N, K], columns in the order of x."""
    floats = weight.dequantise()
    if weight.order is None:
        return floats
    out = torch.empty_like(floats)
    return out.scatter_(2, weight.order.long()[:, None].expand_as(floats), floats)
