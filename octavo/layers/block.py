"""The input and the output of a block: projections from and to the residual stream.

    residual stream ---- norm -> projection -> activation ----> middle of the block     BlockInput
    residual stream <--- norm <- projection ------------------- middle of the block     BlockOutput

A linear layer decides by the rows of x how much of a line its product takes in: on a GPU often all of it, but
for norms of outputs.

With several ranks, what a BlockOutput returns is this rank's part of a sum. The norm of the next block's
input sums it over ranks, adds it to the stream, and norms that: on GPUs often one kernel. A norm of the
output comes after the sum, so there BlockOutput sums.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from octavo.gemm.gated import activate_and_multiply
from octavo.gemm.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class BlockInput:
    """A projection from the residual stream.

    Attributes:
        norm: of the residual stream; sums deltas over ranks, if they are parts. None: the stream is read as
            it is, and deltas are whole.
        projection: [T, hidden] to [T, n].
        activation: name of a gated activation of the result, or None.
    """

    norm: RMSNorm | None
    projection: Linear
    activation: str | None = None

    @property
    def kind(self) -> Hashable:
        """What decides, beside sizes and dtype, which kernels it launches."""
        return type(self.projection).__name__, self.projection.form, self.norm is None

    def __call__(self, hidden: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add delta to hidden in place, then norm and project the sum.

        Args:
            hidden: [T, hidden] residual stream.
            delta: [T, hidden] or None.

        Returns:
            A new [T, n], with an activation [T, n / 2].
        """
        if self.norm is not None:
            return self.projection.from_stream(hidden, delta, self.norm, self.activation)
        out = self.projection(hidden if delta is None else hidden.add_(delta))
        return out if self.activation is None else activate_and_multiply(out, self.activation)


@dataclass(frozen=True, slots=True)
class BlockOutput:
    """A projection to the residual stream.

    Attributes:
        projection: [T, n] to [T, hidden], a part of the sum over ranks.
        norm: of that sum, or None.
        parallel: this rank.
    """

    projection: Linear
    norm: RMSNorm | None
    parallel: TensorParallel

    @property
    def kind(self) -> Hashable:
        """What decides, beside sizes and dtype, which kernels it launches."""
        return type(self.projection).__name__, self.projection.form

    def __call__(self, x: Tensor, hidden: Tensor) -> Tensor | None:
        """Project x [T, n].

        Returns:
            A new [T, hidden], which the next BlockInput has to add to hidden as its delta; or None, if it is
            added already.
        """
        if self.norm is None and self.parallel.size == 1:
            return self.projection.into_stream(x, hidden)
        out = self.projection(x)
        return out if self.norm is None else self.norm(self.parallel.all_reduce(out))
