"""How a block meets the residual stream: what it reads is normed and projected, what it gives projected back.

    residual stream ---- norm -> projection -> activation ----> middle of the block     BlockInput
    residual stream <--- norm <- sum over ranks <- projection --- middle of the block   BlockOutput

On a GPU with Triton steps of few rows do each line in one launch where nothing forbids it. On Hopper GPUs
steps of some more rows do so too, but for the norm before the projection.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

from torch import Tensor

from octavo.gpu.device import has_triton
from octavo.layers.activation import ACTIVATIONS
from octavo.layers.linear.hopper_tiling import can_use
from octavo.layers.linear.plain import Linear, PlainLinear
from octavo.layers.linear.skinny_tiling import is_skinny
from octavo.layers.norm import RMSNorm
from octavo.parallel import TensorParallel

# (hidden [T, hidden], delta [T, hidden] or None) to a new [T, n]: delta is added to hidden in place, and the
# sum normed and projected.
BlockInput = Callable[[Tensor, Tensor | None], Tensor]
# (x [T, n], hidden [T, hidden]) to a new [T, hidden] still to be added to hidden; None: it has been.
BlockOutput = Callable[[Tensor, Tensor], Tensor | None]


@dataclass(frozen=True, slots=True)
class PlainInput:
    """BlockInput on any device.

    Attributes:
        norm: of the residual stream.
        projection: [T, hidden] to [T, n].
        activation: name of a gated activation of the result, or None.
    """

    norm: RMSNorm
    projection: Linear
    activation: str | None

    def __call__(self, hidden: Tensor, delta: Tensor | None = None) -> Tensor:
        """See BlockInput."""
        out = self.projection(self.normed(hidden, delta))
        return out if self.activation is None else ACTIVATIONS[self.activation](out)

    def normed(self, hidden: Tensor, delta: Tensor | None) -> Tensor:
        """Add delta to hidden in place and return the norm of the sum."""
        return self.norm(hidden) if delta is None else self.norm.add_(hidden, delta)


@dataclass(frozen=True, slots=True)
class PlainOutput:
    """BlockOutput on any device.

    Attributes:
        projection: [T, n] to [T, hidden], a part of the sum over ranks.
        norm: of that sum, or None.
        parallel: this rank.
    """

    projection: Linear
    norm: RMSNorm | None
    parallel: TensorParallel

    def __call__(self, x: Tensor, hidden: Tensor) -> Tensor:
        """See BlockOutput."""
        return self.finish(self.projection(x))

    def finish(self, out: Tensor) -> Tensor:
        """Sum over ranks and norm."""
        out = self.parallel.all_reduce(out)
        return out if self.norm is None else self.norm(out)


@dataclass(frozen=True, slots=True)
class FusedInput:
    """BlockInput in one launch for few rows, in two for some.

    The norm is a launch of its own for some rows, and where a delta is still to be added: each program would
    have to write the sum.

    Attributes:
        plain: for more rows.
        linear: its projection.
    """

    plain: PlainInput
    linear: PlainLinear

    def __call__(self, hidden: Tensor, delta: Tensor | None = None) -> Tensor:
        """See BlockInput."""
        weight, bias, activation = self.linear.weight, self.linear.bias, self.plain.activation
        if not is_skinny(hidden.shape[0], *weight.shape):
            if not can_use(hidden, weight):
                return self.plain(hidden, delta)
            from octavo.layers.linear.hopper import hopper_linear

            return hopper_linear(self.plain.normed(hidden, delta), weight, bias, activation=activation)
        from octavo.layers.linear.skinny import skinny_linear

        if delta is not None:
            return skinny_linear(self.plain.normed(hidden, delta), weight, bias, activation=activation)
        norm = self.plain.norm
        return skinny_linear(
            hidden, weight, bias, norm_weight=norm.weight, eps=norm.eps, activation=activation
        )


@dataclass(frozen=True, slots=True)
class FusedOutput:
    """BlockOutput that adds to the residual stream itself for few and some rows, if nothing comes in between.

    Attributes:
        plain: for more rows.
        linear: its projection.
    """

    plain: PlainOutput
    linear: PlainLinear

    def __call__(self, x: Tensor, hidden: Tensor) -> Tensor | None:
        """See BlockOutput."""
        weight, bias = self.linear.weight, self.linear.bias
        if is_skinny(x.shape[0], *weight.shape):
            from octavo.layers.linear.skinny import skinny_linear as product
        elif can_use(x, weight):
            from octavo.layers.linear.hopper import hopper_linear as product
        else:
            return self.plain(x, hidden)
        if self.plain.norm is not None or self.plain.parallel.size > 1:
            return self.plain.finish(product(x, weight, bias))
        product(x, weight, bias, residual=hidden)
        return None


def make_input(norm: RMSNorm, projection: Linear, activation: str | None = None) -> PlainInput | FusedInput:
    """Return the fastest BlockInput for where the projection's weight lives; arguments as PlainInput."""
    plain = PlainInput(norm, projection, activation)
    return FusedInput(plain, projection) if _can_fuse(projection) else plain


def make_output(
    projection: Linear, norm: RMSNorm | None, parallel: TensorParallel
) -> PlainOutput | FusedOutput:
    """Return the fastest BlockOutput for where the projection's weight lives; arguments as PlainOutput."""
    plain = PlainOutput(projection, norm, parallel)
    return FusedOutput(plain, projection) if _can_fuse(projection) else plain


def _can_fuse(projection: Linear) -> TypeGuard[PlainLinear]:
    return (
        isinstance(projection, PlainLinear)
        and has_triton(projection.weight)
        and projection.weight.is_contiguous()
    )
