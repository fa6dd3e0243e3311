"""Root-mean-square norms."""

import math

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from octavo.gpu.device import has_triton
from octavo.layers.cpu import layers as cpu_layers
from octavo.parallel import TensorParallel


class RMSNorm:
    """y = x / rms(x) * weight over the last dimension.

    Source: Zhang and Sennrich 2019.
    """

    def __init__(self, weight: Tensor, eps: float, parallel: TensorParallel = TensorParallel()) -> None:
        """Keep the weight.

        Args:
            weight: [n]; if float32, half-precision inputs are normalised in float32.
            eps: added to the mean square.
            parallel: the ranks over which deltas are summed; the only rank: they are whole.
        """
        self.weight = weight
        self.eps = eps
        self._parallel = parallel

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add delta, if any, to x in place, both [T, n]; return the norm of x, a new tensor of its dtype.

        With several ranks delta is this rank's part, and its memory is used for the sum of all parts.
        """
        if delta is not None and self._parallel.size > 1:
            memory = self._parallel.memory_for(delta) if has_triton(delta) else None
            if memory is not None:
                from octavo.layers.triton.sum_norm import sum_rms_norm

                return sum_rms_norm(x, delta, self.weight, self.eps, memory)
            delta = self._parallel.all_reduce(delta)
        if has_triton(x):
            from octavo.layers.triton.norm import rms_norm as triton_rms_norm

            return triton_rms_norm(x, self.weight, self.eps, delta=delta)
        tensors = (x, self.weight) if delta is None else (x, self.weight, delta)
        if cpu_layers.unsupported_reason(*tensors) is None:
            return cpu_layers.compiled_layers().add_rms_norm(x, delta, self.weight, self.eps)
        if delta is not None:
            x.add_(delta)
        weight = self.weight
        return rms_norm(x.to(weight.dtype), weight.shape, weight, self.eps).to(x.dtype)


class HeadRMSNorm:
    """RMSNorm of each query and key head, with one weight row per head, in place."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """Keep the weight.

        Args:
            weight: [H, D] float32, contiguous.
            eps: added to the mean square.
        """
        self.weight = weight
        self.eps = eps
        self._folded, self._floor = _fold(weight, eps)

    def apply_(self, heads: Tensor) -> None:
        """Normalise [T, H, D] heads (a strided view will do) in place."""
        if heads.dtype == torch.float32:
            heads.div_(_lengths(heads, self._floor)).mul_(self._folded)
        else:
            exact = heads.float()
            heads.copy_(exact.div_(_lengths(exact, self._floor)).mul_(self._folded))


def _fold(weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return sqrt(n) weight and sqrt(n eps), with which x / |x| replaces x / rms(x)."""
    size = weight.shape[-1]
    return weight * math.sqrt(size), torch.tensor(math.sqrt(size * eps), device=weight.device)


def _lengths(x: Tensor, floor: Tensor) -> Tensor:
    """Return sqrt(|x|^2 + floor^2) over the last dimension: [..., 1]."""
    return torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), floor)
