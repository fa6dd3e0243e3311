"""The one place that chooses how a layer's experts are multiplied.

a layer, when it is made      on a GPU with Triton    stacked
                              elsewhere               listed: linear layers, by gemm.table
each step of a stacked one    1 token                 gemv, on a Hopper GPU; 1 to 4 in float8
                              1 to 4 tokens           few; 1 or 2 in packed weights
                              others                  rounded, float8
                                                      persistent, on a Hopper GPU, MXFP4, many an expert
                                                      grouped, tiled by rows per expert
                              deterministic=True      grouped, one tiling
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from octavo.forms import float_experts as float8
from octavo.forms import mxfp4_experts as mxfp4
from octavo.gemm import packed_linear as grouped
from octavo.gemm.hopper.floats import expert_gemv_tiling as float_gemv
from octavo.gemm.hopper.mxfp4 import mxfp4_gemv_tiling as mxfp4_gemv
from octavo.gemm.hopper.mxfp4 import mxfp4_rows_tiling as mxfp4_many
from octavo.gemm.hopper.packed import packed_expert_tiling as packed_gemv
from octavo.gemm.portable.experts.expert_tiling import AnyExpertWeight, most_few_tokens
from octavo.gemm.table import describe_layers
from octavo.kernels.device import has_triton

# Rows of an expert: with more, programs that stay are faster, on an H100.
_MAX_GROUPED = 48

# Methods of StackedExperts.
Product = Literal["gemv", "few", "grouped", "rounded", "persistent"]

# Kind of a QuantisedWeight -> unsupported_reason of the kernels that multiply such experts as they are.
_STACKABLE: Mapping[str, Callable[[torch.device, torch.dtype], str | None]] = MappingProxyType(
    {
        "float8": float8.unsupported_reason,
        "mxfp4": mxfp4.unsupported_reason,
        "blocks": grouped.unsupported_reason,
    }
)


def stacks_experts(weight: Tensor) -> bool:
    """Return whether experts become one tensor, given a weight of their dtype on their device."""
    return has_triton(weight)


def unstackable_reason(kind: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a GPU's kernels cannot multiply a kind of experts as they are stored, or None if they can.

    Args:
        kind: see QuantisedWeight.
        device: of the weights.
        dtype: of activations.
    """
    if kind not in _STACKABLE:
        return f"no kernel multiplies experts in {kind}; there are kernels for {', '.join(_STACKABLE)}"
    return _STACKABLE[kind](device, dtype)


def describe_experts(kind: str, device: torch.device, dtype: torch.dtype) -> str:
    """Say how experts of a kind that stays quantised are multiplied; see gemm.table.describe_layers."""
    if device.type == "cuda":
        rows = "rows of more than four tokens in float8, " if kind == "float8" else ""
        return f"{rows}by GPU kernels that read each touched expert once"
    return describe_layers(kind, device, dtype)


def choose_product(
    x: Tensor,
    weights: Sequence[AnyExpertWeight],
    num_chosen: int,
    *,
    rows_per_expert: float,
    deterministic: bool,
) -> Product:
    """Return how the experts of a step's tokens are multiplied. Called per layer and step.

    Args:
        x: [T, hidden].
        weights: of gate and up, and of down.
        num_chosen: experts of a token.
        rows_per_expert: on average.
        deterministic: see StackedExperts.
    """
    if deterministic:
        return "grouped"
    if any(form.can_stream(x, weights, num_chosen) for form in (mxfp4_gemv, float_gemv, packed_gemv)):
        return "gemv"
    if len(x) <= min(most_few_tokens(weight) for weight in weights):
        return "few"
    if all(isinstance(weight, float8.ExpertWeight) and weight.scales is not None for weight in weights):
        return "rounded"
    if rows_per_expert > _MAX_GROUPED and all(
        mxfp4_many.unsupported_reason(x, weight) is None for weight in weights
    ):
        return "persistent"
    return "grouped"
