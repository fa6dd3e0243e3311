"""The one place that chooses how a layer's experts are multiplied.

a layer, when it is made      on a GPU with Triton    stacked
                              elsewhere               listed: linear layers, by linear.choice
each step of a stacked one    1 to 4 tokens           few
                              others                  grouped, tiled by rows per expert
                              deterministic=True      grouped, one tiling
                              packed weights          grouped, tiled by rows per expert
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from octavo.gpu.device import has_triton
from octavo.layers.linear.choice import describe_layers
from octavo.layers.linear.grouped import linear as grouped
from octavo.layers.moe import mxfp4_weight as mxfp4
from octavo.layers.moe import weight as float8

# Each pair of a token and an expert reads its expert's weight. More tokens share experts.
_MAX_FEW = 4

Product = Literal["few", "grouped"]

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
    """Say how experts of a kind that stays quantised are multiplied; see linear.choice.describe_layers."""
    if device.type == "cuda":
        return "by GPU kernels that read each touched expert once"
    return describe_layers(kind, device, dtype)


def choose_product(num_tokens: int, *, is_packed: bool, deterministic: bool) -> Product:
    """Return how the experts of a step's tokens are multiplied. Called per layer and step."""
    return "grouped" if num_tokens > _MAX_FEW or is_packed or deterministic else "few"
