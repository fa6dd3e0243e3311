"""Linear layers that dequantise their weight in each GEMM, in PyTorch on any device: the specification.

    y = x W^T + b, W in the dtype of x

Activations are not quantised. Each call dequantises some rows at a time, which saves memory, not time.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.nn.functional import linear

from octavo.forms.base import QuantisedWeight, join_rows
from octavo.gemm.linear import UnfusedLinear

# Values dequantised at a time: 4 MiB in float32.
_CHUNK = 2**20


class _PartedWeight(Protocol):
    """A QuantisedWeight [N, K] of which rows can be cut out."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def part(self, start: int, stop: int) -> QuantisedWeight: ...


class DequantisedLinear(UnfusedLinear):
    """y = x W^T + b with a quantised weight."""

    def __init__(self, weight: _PartedWeight, bias: Tensor | None = None) -> None:
        """Keep weight [N, K] and bias [N]."""
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        num_rows, size = self.weight.shape
        out = x.new_empty(x.shape[0], num_rows)
        step = max(1, _CHUNK // max(1, size))
        for start in range(0, num_rows, step):
            rows = slice(start, start + step)
            bias = None if self.bias is None else self.bias[rows]
            out[:, rows] = linear(x, self.weight.part(start, start + step).dequantise().to(x.dtype), bias)
        return out


def make_layer(weights: Sequence[Any], bias: Tensor | None) -> DequantisedLinear:
    """Return the layer of weights of one form that lie above one another and have a `part`, and bias."""
    (weight,) = join_rows(weights)
    return DequantisedLinear(weight, bias)
