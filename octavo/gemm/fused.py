"""What a block asks of a linear layer that fuses its neighbours, norm, activation and residual sum, and the
GEMMs that do so.
"""

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor


class Norm(Protocol):
    """An RMS norm; see octavo.layers.norm.RMSNorm."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor: ...

    def whole(self, delta: Tensor | None) -> Tensor | None: ...


@runtime_checkable
class FusedLinear(Protocol):
    """A linear layer that decides for itself, by the rows of x, what its GEMM fuses."""

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

    def into_stream(self, x: Tensor, hidden: Tensor) -> None:
        """Add x W^T + b, [T, out], to hidden in place."""
        ...


def product_of(gemm: Literal["gemv", "skinny", "hopper"]) -> Callable[..., Tensor]:
    """Return the function of a GEMM that fuses; imported here, only where Triton runs."""
    if gemm == "gemv":
        from octavo.gemm.hopper.floats.float_gemv import gemv_linear as product
    elif gemm == "skinny":
        from octavo.gemm.portable.skinny import skinny_linear as product
    else:
        from octavo.gemm.hopper.floats.dense_gemm import hopper_linear as product
    return product


def activated(out: Tensor, activation: str | None) -> Tensor:
    """Activate a product whose GEMM did not: by the name of a gated activation, or None."""
    if activation is None:
        return out
    from octavo.kernels.activation import gated_activation

    return gated_activation(out, activation)
