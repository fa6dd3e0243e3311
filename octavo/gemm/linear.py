"""What a linear layer is to a block, and the layers that fuse nothing with their product."""

from collections.abc import Hashable
from typing import Protocol

from torch import Tensor
from torch.nn.functional import linear

from octavo.gemm.gated import activate_and_multiply


class Norm(Protocol):
    """An RMS norm; see octavo.layers.norm.RMSNorm."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...

    @property
    def stream_scale(self) -> float: ...

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor: ...

    def whole(self, delta: Tensor | None) -> Tensor | None: ...


class Linear(Protocol):
    """y = x W^T + b, and as much of its neighbours in a block as the product takes in."""

    @property
    def form(self) -> Hashable:
        """What decides, beside its class, sizes and dtype, which kernels it launches."""
        ...

    @property
    def has_gemv(self) -> bool:
        """Whether a single row is multiplied by a kernel that fetches weights early; see Product.streams."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        ...

    def from_stream(self, hidden: Tensor, delta: Tensor | None, norm: Norm, activation: str | None) -> Tensor:
        """Add delta, if any, to hidden in place, and return activation(norm(hidden) W^T + b).

        Args:
            hidden: [T, in] residual stream.
            delta: [T, in] or None.
            norm: of the sum.
            activation: name of a gated activation of the result, or None.
        """
        ...

    def into_stream(self, x: Tensor, hidden: Tensor) -> Tensor | None:
        """Add x W^T + b, [T, out], to hidden in place and return None; or return it, for a norm to add."""
        ...


class UnfusedLinear:
    """A base of layers whose product takes in nothing: they define __call__."""

    form: Hashable = None
    has_gemv = False

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        raise NotImplementedError

    def from_stream(self, hidden: Tensor, delta: Tensor | None, norm: Norm, activation: str | None) -> Tensor:
        """See Linear."""
        out = self(norm(hidden, delta))
        return out if activation is None else activate_and_multiply(out, activation)

    def into_stream(self, x: Tensor, hidden: Tensor) -> Tensor | None:
        """See Linear."""
        return self(x)


class PlainLinear(UnfusedLinear):
    """y = x W^T + b in the weight's own layout, by torch's own product."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Keep weight [out, in] and bias [out]."""
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        return linear(x, self.weight, self.bias)
