"""Linear layers on GPUs of MXFP4: as integers of 8 bits in groups of 32, by the kernels of linear.grouped.

Scales are float16 there: one that is less than 2^-31 of a matrix's largest becomes 0.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from octavo.forms.mxfp4 import Mxfp4Weight
from octavo.gemm import packed_linear as grouped

DESCRIPTION = "as integers of 8 bits, by GPU kernels"


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why such weights cannot be multiplied by x of a dtype on a device, or None if they can."""
    return grouped.unsupported_reason(device, dtype)


def make_layer(weights: Iterable[Mxfp4Weight], bias: Tensor | None) -> grouped.GroupedLinear:
    """Return the layer of weights that lie above one another, [N_i, K] each, and bias [sum of N_i]."""
    return grouped.make_layer([weight.in_bytes() for weight in weights], bias)
