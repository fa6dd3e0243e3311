"""Names of the products that octavo.gemm.table has for some rows, and GPUs that are not here."""

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from octavo.forms.base import ExpertsWeight, weight_kind
from octavo.gemm import gpu_linear, product
from octavo.gemm.product import Product
from octavo.gemm.table import EXPERTS, PRODUCTS


def take_for_hopper(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let the table, and modules that ask as well, take tensors on the CPU for tensors on a Hopper GPU."""
    for module in (product, gpu_linear, *modules):
        monkeypatch.setattr(module, "nvidia_generation", lambda device: 9)


def product_name(
    x: torch.Tensor | int, weight: Any, *, is_gated: bool = False, hopper: Sequence[str] | None = None
) -> str:
    """Return the name of the product of x [M, K], or M rows in bfloat16, and a weight.

    Args:
        x: rows, or how many.
        weight: of a form that the table knows.
        is_gated: see product.find.
        hopper: the only products of Hopper GPUs that there are; None: all.
    """
    if isinstance(x, int):
        x = torch.empty(x, weight.shape[1], dtype=torch.bfloat16)
    rows = _without_others(product.available(PRODUCTS[weight_kind(weight)], weight), hopper)
    return product.find(rows, x, weight, is_gated=is_gated).name


def expert_product_name(
    x: torch.Tensor,
    weights: Sequence[ExpertsWeight],
    num_chosen: int,
    *,
    rows_per_expert: float,
    deterministic: bool,
    hopper: Sequence[str] | None = None,
) -> str:
    """Return the name of the product of tokens x and their experts."""
    rows = [_without_others(product.available(EXPERTS[weight.kind], weight), hopper) for weight in weights]
    pairs = product.pair(*rows, deterministic=deterministic)
    both = product.find_pair(pairs, x, weights, num_chosen=num_chosen, rows_per_expert=rows_per_expert)
    assert both[0].name == both[1].name
    return both[0].name


def _without_others(rows: Iterable[Product], hopper: Sequence[str] | None) -> list[Product]:
    return [row for row in rows if not row.generation or hopper is None or row.name in hopper]
