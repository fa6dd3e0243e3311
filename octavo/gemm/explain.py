"""Which rows of gemm.table a weight takes, for numbers of rows, on a device that need not be here."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from octavo.forms.base import StackShape, Storage
from octavo.gemm.cpu import compiled_rows, matrix_units
from octavo.gemm.product import MANY, Layer, Target, available, find, find_layer, find_pair, pair
from octavo.gemm.table import EXPERT_LAYERS, EXPERTS, LAYERS, PRODUCTS

_META = torch.device("meta")
# Numbers of rows that are looked at; what lies between two that differ is looked at, too.
_PROBES = (*range(1, 258), *(2**power for power in range(9, 17)))

# Rows of x -> (name of the product, why).
_Chooser = Callable[[int], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class TakenRow:
    """A product for some numbers of rows.

    Attributes:
        rows: least and most; MANY: any number.
        product: its name.
        why: what the table says.
    """

    rows: tuple[int, int]
    product: str
    why: str


def explain(
    kind: str,
    shape: tuple[int, int],
    target: Target,
    *,
    storage: Storage | None = None,
    is_gated: bool = False,
    rounds: bool = False,
) -> list[TakenRow]:
    """Return the products of a weight [N, K].

    Args:
        kind: see LAYERS.
        shape: (N, K).
        target: device and dtype of activations.
        storage: of a weight that is stored quantised.
        is_gated: whether an activation of gate and up follows.
        rounds: whether a CPU may round many rows to bfloat16; see make_quantised_linear.
    """
    layers = [each for each in LAYERS[kind] if each.device == "" or each.device == target.device.type]
    layer = _layer_for(layers, target)
    if not layer.form:
        return [TakenRow((1, MANY), layer.make.split(":")[0], layer.describe())]
    if layer.device == "cpu":
        weight = torch.empty(shape, device=_META)
        own = SimpleNamespace(
            weight=weight,
            units=matrix_units.matrix_units(),
            rounds=rounds,
            runs_in_c=compiled_rows.unsupported_reason(shape[0]) is None,
        )
        return _ranges(_dense(layer.form, own, 0, target, shape[1], is_gated))
    if layer.blank is None:
        weight = torch.empty(shape, dtype=target.dtype, device=_META)
    else:
        weight = layer.blank(shape, storage, _META)
    if layer.fits is not None and layer.blank is not None and not layer.fits(weight):
        return [TakenRow((1, MANY), "dequantised", layers[-1].describe())]
    return _ranges(_dense(layer.form, weight, target.generation, target, shape[1], is_gated))


def explain_experts(
    kinds: Sequence[str],
    shapes: tuple[tuple[int, int, int], tuple[int, int, int]],
    num_chosen: int,
    target: Target,
    *,
    storages: tuple[Storage | None, Storage | None] = (None, None),
    has_bias: bool = False,
    deterministic: bool = False,
    num_elsewhere: int = 0,
) -> list[TakenRow]:
    """Return the products of experts on a GPU, by tokens.

    Args:
        kinds: of gate and up, and of down; see EXPERT_LAYERS.
        shapes: (E, N, K) of gate and up, and of down.
        num_chosen: experts of a token.
        target: device and dtype of activations.
        storages: of gate and up, and of down, if they are stored quantised.
        has_bias, deterministic, num_elsewhere: see StackedExperts.
    """
    weights = []
    for kind, (number, rows, columns), parts, storage in zip(kinds, shapes, (2, 1), storages, strict=True):
        shape = StackShape(number, rows, columns, parts, target.dtype, _META)
        weight = EXPERT_LAYERS[kind].blank.blank(shape, storage)
        bias = torch.empty(number, rows, dtype=target.dtype, device=_META)
        weights.append(replace(weight, bias=bias) if has_bias else weight)
    pairs = pair(
        *(available(EXPERTS[each.kind], each, target.generation) for each in weights),
        deterministic=deterministic,
    )
    number, _, size = shapes[0]

    def choose(num_tokens: int) -> tuple[str, str]:
        x = torch.empty(num_tokens, size, dtype=target.dtype, device=_META)
        per_expert = num_tokens * num_chosen / (number + num_elsewhere)
        up, _ = find_pair(pairs, x, weights, num_chosen=num_chosen, rows_per_expert=per_expert)
        return f"{up.launch}:{up.name}", up.why

    return _ranges(choose)


def _layer_for(layers: list[Layer], target: Target) -> Layer:
    """Return the first layer that runs on a target and, on a CPU, takes its floats."""
    on_cpu = target.device.type == "cpu"
    floats = torch.empty(0, dtype=target.dtype)
    takes = [each for each in layers if not on_cpu or each.fits is None or each.fits(floats)]
    layer = find_layer(takes, target)
    assert layer is not None, f"nothing multiplies such weights on {target}"
    return layer


def _dense(form: str, weight: Any, generation: int, target: Target, size: int, is_gated: bool) -> _Chooser:
    products = available(PRODUCTS[form], weight, generation)

    def choose(num_rows: int) -> tuple[str, str]:
        x: Tensor = torch.empty(num_rows, size, dtype=target.dtype, device=_META)
        product = find(products, x, weight, is_gated=is_gated)
        return product.launch if ":" in product.launch else product.name, product.why

    return choose


def _ranges(choose: _Chooser) -> list[TakenRow]:
    """Return the numbers of rows that have one product, from the least on."""
    choose = cache(choose)
    found: list[TakenRow] = []
    for least, most in _edges(choose):
        found.append(TakenRow((least, most), *choose(least)))
    return found


def _edges(choose: _Chooser) -> Iterator[tuple[int, int]]:
    least = known = _PROBES[0]
    for probe in _PROBES[1:]:
        if choose(probe) != choose(least):
            low, high = known, probe
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if choose(middle) == choose(least) else (low, middle)
            yield least, low
            least = high
        known = probe
    yield least, MANY
