"""What a linear layer is, and the plain one: torch's own GEMM."""

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import linear

# [T, in] to [T, out].
Linear = Callable[[Tensor], Tensor]


class PlainLinear:
    """y = x W^T + b in the weight's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Keep weight [out, in] and bias [out]."""
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        return linear(x, self.weight, self.bias)
