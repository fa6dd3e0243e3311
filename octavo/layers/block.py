"""How a block meets the residual stream: its input is normed and projected, its output projected back.

    residual stream ---- norm -> projection -> activation ----> middle of the block     BlockInput
    residual stream <--- norm <- sum over ranks <- projection --- middle of the block   BlockOutput

On a GPU with Triton, the skinny GEMM (1 to 4 rows) runs each line in one launch if neither ranks nor a norm
come between its parts. So does the GEMM for Hopper GPUs (5 to 256 rows), but for the norm before the
projection. linear.choice decides which GEMM runs.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from octavo.layers.activation import ACTIVATIONS
from octavo.layers.linear.choice import choose_gemm, has_fused_gemms
from octavo.layers.linear.plain import Linear, PlainLinear
from octavo.layers.norm import RMSNorm
from octavo.parallel import TensorParallel

# (hidden [T, hidden], delta [T, hidden] or None) to a new [T, n]: adds delta to hidden in place, then norms
# and projects the sum.
BlockInput = Callable[[Tensor, Tensor | None], Tensor]
# (x [T, n], hidden [T, hidden]) to a new [T, hidden] still to be added to hidden; None: it is added already.
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
    """BlockInput in one launch by the skinny GEMM, in two by the one for Hopper GPUs.

    The norm is a launch of its own before a Hopper GEMM, and where a delta is still to be added: each program
    would have to write the sum.

    Attributes:
        plain: for steps whose GEMM fuses nothing.
        linear: its projection.
    """

    plain: PlainInput
    linear: PlainLinear

    def __call__(self, hidden: Tensor, delta: Tensor | None = None) -> Tensor:
        """See BlockInput."""
        weight, bias, activation = self.linear.weight, self.linear.bias, self.plain.activation
        gemm = choose_gemm(hidden, weight)
        if gemm == "plain":
            return self.plain(hidden, delta)
        if gemm == "hopper":
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
    """BlockOutput whose GEMM adds itself to the residual stream, if neither ranks nor a norm come in between.

    Attributes:
        plain: for steps whose GEMM fuses nothing.
        linear: its projection.
    """

    plain: PlainOutput
    linear: PlainLinear

    def __call__(self, x: Tensor, hidden: Tensor) -> Tensor | None:
        """See BlockOutput."""
        weight, bias = self.linear.weight, self.linear.bias
        gemm = choose_gemm(x, weight)
        if gemm == "plain":
            return self.plain(x, hidden)
        if gemm == "hopper":
            from octavo.layers.linear.hopper import hopper_linear as product
        else:
            from octavo.layers.linear.skinny import skinny_linear as product
        if self.plain.norm is not None or self.plain.parallel.size > 1:
            return self.plain.finish(product(x, weight, bias))
        product(x, weight, bias, residual=hidden)
        return None


def make_input(norm: RMSNorm, projection: Linear, activation: str | None = None) -> PlainInput | FusedInput:
    """Return the fastest BlockInput for where the projection's weight lives; arguments as PlainInput."""
    plain = PlainInput(norm, projection, activation)
    return FusedInput(plain, projection) if has_fused_gemms(projection) else plain


def make_output(
    projection: Linear, norm: RMSNorm | None, parallel: TensorParallel
) -> PlainOutput | FusedOutput:
    """Return the fastest BlockOutput for where the projection's weight lives; arguments as PlainOutput."""
    plain = PlainOutput(projection, norm, parallel)
    return FusedOutput(plain, projection) if has_fused_gemms(projection) else plain
