"""An engine whose projections and experts have random weights in 4 bits, in groups of 128."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from gpu_moe import random_packed
from torch import Tensor

from octavo.forms.base import QuantisedWeight
from octavo.gemm.linear import Linear, PlainLinear
from octavo.gemm.make_linear import make_quantised_linear
from octavo.gemm.stacked_experts import StackedExperts
from octavo.models.experts.loading import ExpertShape

from .products import random_blocks

# What tells vLLM to make weights of the same size.
GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "lm_head": False,
}  # fmt: skip
# Rows of a weight that is an LM head's.
_VOCABULARY = 65536


@contextmanager
def random_int4() -> Iterator[None]:
    """Let engines that are built meanwhile have such weights."""
    with (
        patch("octavo.models.building.packing.make_linear", _linear),
        patch("octavo.models.builder.read_stacked", _experts),
    ):
        yield


def _linear(weight: Tensor, bias: Tensor | None = None, *, quantization: str = "none") -> Linear:
    """Return a layer in the place of a projection's; the LM head stays as it is."""
    if weight.shape[0] > _VOCABULARY:
        return PlainLinear(weight, bias)
    weights: list[QuantisedWeight] = [random_blocks(*weight.shape, bits=4, group=128, mins=True)]
    return make_quantised_linear(weights, bias, dtype=weight.dtype)


def _experts(
    checkpoint: object, names: Sequence[str], part: object, shape: ExpertShape, **options: Any
) -> StackedExperts:
    """Return experts in the place of a layer's."""
    gate_up = random_packed(len(names), 2 * shape.size, shape.hidden, 2)
    return StackedExperts(gate_up, random_packed(len(names), shape.hidden, shape.size, 1), **options)
