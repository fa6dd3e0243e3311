"""The input and the output of a block: projections from and to the residual stream.

    residual stream ---- norm -> projection -> activation ----> middle of the block     BlockInput
    residual stream <--- norm <- projection ------------------- middle of the block     BlockOutput

On a GPU with Triton, the GEMV (1 row) and the skinny GEMM (up to 4 rows) fuse each line into one kernel, but
for norms of outputs. The Hopper GEMM (2 to 256 rows) does the same but for the norm of the input.
gemm.table decides which one runs.

With several ranks, what a BlockOutput returns is this rank's part of a sum. The norm of the next block's
input sums it over ranks, adds it to the stream, and norms that: on GPUs often one kernel. A norm of the
output comes after the sum, so there BlockOutput sums.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from torch import Tensor

from octavo.gemm.fused import FusedLinear, product_of
from octavo.gemm.plain import Linear, PlainLinear
from octavo.gemm.table import choose_gemm, has_fused_gemms
from octavo.layers.activation import activate_and_multiply
from octavo.layers.norm import RMSNorm
from octavo.parallel import TensorParallel

# (hidden [T, hidden], delta [T, hidden] or None) -> new [T, n]: adds delta to hidden in place, then norms and
# projects the sum.
BlockInput = Callable[[Tensor, Tensor | None], Tensor]
# (x [T, n], hidden [T, hidden]) -> new [T, hidden], which the caller hands to the next BlockInput as its
# delta, or None if it is added already.
BlockOutput = Callable[[Tensor, Tensor], Tensor | None]


@dataclass(frozen=True, slots=True)
class PlainInput:
    """BlockInput on any device.

    Attributes:
        norm: of the residual stream; sums deltas over ranks, if they are parts.
        projection: [T, hidden] to [T, n].
        activation: name of a gated activation of the result, or None.
    """

    norm: RMSNorm
    projection: Linear
    activation: str | None

    def __call__(self, hidden: Tensor, delta: Tensor | None = None) -> Tensor:
        """See BlockInput."""
        out = self.projection(self.norm(hidden, delta))
        return out if self.activation is None else activate_and_multiply(out, self.activation)


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
        """Sum over ranks and norm, if there is a norm."""
        return out if self.norm is None else self.norm(self.parallel.all_reduce(out))


@dataclass(frozen=True, slots=True)
class FusedInput:
    """BlockInput in one kernel by the GEMV or the skinny GEMM, or in two by the Hopper GEMM.

    The norm is a separate kernel before a Hopper GEMM, and if a delta has to be added: otherwise each program
    of the GEMM would write the sum.

    Attributes:
        plain: used if choose_gemm says "plain".
        linear: its projection.
    """

    plain: PlainInput
    linear: PlainLinear

    def __call__(self, hidden: Tensor, delta: Tensor | None = None) -> Tensor:
        """See BlockInput."""
        weight, bias = self.linear.weight, self.linear.bias
        norm, activation = self.plain.norm, self.plain.activation
        gemm = choose_gemm(hidden, weight)
        if gemm == "plain":
            return self.plain(hidden, delta)
        product = product_of(gemm)
        if gemm == "hopper" or delta is not None:
            return product(norm(hidden, delta), weight, bias, activation=activation)
        return product(hidden, weight, bias, norm_weight=norm.weight, eps=norm.eps, activation=activation)


@dataclass(frozen=True, slots=True)
class FusedOutput:
    """BlockOutput whose GEMM adds its result to the residual stream, unless ranks or a norm come between.

    Attributes:
        plain: used if choose_gemm says "plain".
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
        product = product_of(gemm)
        if self.plain.norm is not None or self.plain.parallel.size > 1:
            return self.plain.finish(product(x, weight, bias))
        product(x, weight, bias, residual=hidden)
        return None


@dataclass(frozen=True, slots=True)
class StreamInput:
    """BlockInput of a linear layer that fuses what it can itself.

    Attributes:
        plain: norm and activation.
        linear: its projection.
    """

    plain: PlainInput
    linear: FusedLinear

    def __call__(self, hidden: Tensor, delta: Tensor | None = None) -> Tensor:
        """See BlockInput."""
        return self.linear.from_stream(hidden, delta, self.plain.norm, self.plain.activation)


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """BlockOutput of a linear layer that fuses what it can itself.

    Attributes:
        plain: norm and ranks.
        linear: its projection.
    """

    plain: PlainOutput
    linear: FusedLinear

    def __call__(self, x: Tensor, hidden: Tensor) -> Tensor | None:
        """See BlockOutput."""
        if self.plain.norm is not None or self.plain.parallel.size > 1:
            return self.plain(x, hidden)
        self.linear.into_stream(x, hidden)
        return None


def kernels_of(block: BlockInput | BlockOutput) -> Hashable:
    """Return what decides, beside sizes and dtype, which kernels a block launches.

    That is the class of its linear layer, and the layer's `form`, if it has one.
    """
    linear = getattr(block, "linear", None) or getattr(block, "projection", None)
    return type(linear).__name__, getattr(linear, "form", None)


def make_input(
    norm: RMSNorm, projection: Linear, activation: str | None = None
) -> PlainInput | FusedInput | StreamInput:
    """Return the fastest BlockInput on the projection's device; arguments as for PlainInput."""
    plain = PlainInput(norm, projection, activation)
    if isinstance(projection, FusedLinear):
        return StreamInput(plain, projection)
    return FusedInput(plain, projection) if has_fused_gemms(projection) else plain


def make_output(
    projection: Linear, norm: RMSNorm | None, parallel: TensorParallel
) -> PlainOutput | FusedOutput | StreamOutput:
    """Return the fastest BlockOutput on the projection's device; arguments as for PlainOutput."""
    plain = PlainOutput(projection, norm, parallel)
    if isinstance(projection, FusedLinear):
        return StreamOutput(plain, projection)
    return FusedOutput(plain, projection) if has_fused_gemms(projection) else plain
