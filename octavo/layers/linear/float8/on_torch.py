"""Linear layers whose weight stays in float8, in PyTorch on any device: the specification."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.layers.linear.dequantised import DequantisedLinear
from octavo.layers.linear.float8.weight import Float8Weight
from octavo.layers.linear.quantised import join_rows

DESCRIPTION = "dequantised in each GEMM, by PyTorch"


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return None: it runs on every device, in every dtype."""
    return None


def make_layer(weights: Sequence[Float8Weight], bias: Tensor | None) -> DequantisedLinear:
    """Return the layer of weights that lie above one another, with tiles of one width, and bias."""
    (weight,) = join_rows(weights)
    return DequantisedLinear(weight, bias)
