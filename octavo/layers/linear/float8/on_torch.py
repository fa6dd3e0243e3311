"""Linear layers whose weight stays in float8, in PyTorch on any device: the specification.

    y = x W^T + b, W = scale * number in the dtype of x

Activations are not quantised. Each call makes numbers of the weight, some rows at a time: it saves memory,
not time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from octavo.layers.linear.float8.weight import Float8Weight
from octavo.layers.linear.quantised import join_rows

DESCRIPTION = "dequantised in each product, by PyTorch"
# Numbers of a weight that are made at a time: 4 MiB in float32.
_CHUNK = 2**20


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return None: it runs on every device, in every dtype."""
    return None


class Float8Linear:
    """y = x W^T + b with a float8 weight."""

    def __init__(self, weight: Float8Weight, bias: Tensor | None = None) -> None:
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


def make_layer(weights: Sequence[Float8Weight], bias: Tensor | None) -> Float8Linear:
    """Return the layer of weights that lie above one another, with tiles of one width, and bias."""
    (weight,) = join_rows(weights)
    return Float8Linear(weight, bias)
