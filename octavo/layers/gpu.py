"""Whether the fused GPU layers can run. Importing this imports no Triton."""

from functools import cache

import torch
from torch import Tensor

from octavo.attention import available_impls


def has_triton(tensor: Tensor) -> bool:
    """True for tensors on a GPU that Triton compiles for."""
    return tensor.is_cuda and _has_triton(tensor.dtype)


@cache
def _has_triton(dtype: torch.dtype) -> bool:
    return available_impls("cuda", dtype)["triton"] is None
