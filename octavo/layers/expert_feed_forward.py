"""The feed-forward block of a mixture of experts."""

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from octavo.gemm.gated import activate_and_multiply
from octavo.gemm.linear import Linear
from octavo.layers.experts import Experts
from octavo.layers.feed_forward import FeedForward
from octavo.layers.norm import RMSNorm
from octavo.layers.router import Router
from octavo.parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The feed-forward that every token goes to, beside the experts it chooses.

    Attributes:
        gate_up: [T, hidden] to this rank's [gate | up].
        down: back to [T, hidden], a part of the sum over ranks.
        activation: name of the gated activation.
        gate: from [T, hidden] to [T, 1], which as a sigmoid is the factor of the result; or None.
    """

    gate_up: Linear
    down: Linear
    activation: str
    gate: Linear | None = None

    @property
    def kind(self) -> Hashable:
        """What blocks have in common if they launch the same kernels."""
        parts = (self.gate_up, self.down, self.gate)
        return tuple((type(part).__name__, getattr(part, "form", None)) for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, hidden] of normed x [T, hidden]."""
        out = self.down(activate_and_multiply(self.gate_up(x), self.activation))
        return out if self.gate is None else out * self.gate(x).sigmoid()


@dataclass(frozen=True, slots=True)
class ExpertFeedForward:
    """Routes each token of the normed residual stream to its experts.

    Every rank routes alike, and holds a part of every expert, or some experts whole.

    Attributes:
        norm: of the residual stream.
        router: which experts a token goes to.
        experts: this rank's part of them.
        parallel: this rank.
        shared: what every token goes to as well, or None.
    """

    norm: RMSNorm
    router: Router
    experts: Experts
    parallel: TensorParallel
    shared: SharedExpert | None = None

    @property
    def kind(self) -> Hashable:
        """What blocks have in common if they launch the same kernels."""
        shared = None if self.shared is None else self.shared.kind
        return type(self.experts).__name__, getattr(self.experts, "form", None), shared

    def __call__(self, hidden: Tensor, delta: Tensor | None, slots: Tensor | None = None) -> Tensor | None:
        """Run the block; arguments and result as for DecoderLayer."""
        if delta is None:
            x, choice = self.router.from_stream(hidden, self.norm, slots)
        else:
            x = self.norm(hidden, delta)
            choice = self.router(x, slots)
        if self.parallel.size > 1:
            out = self.experts(x, choice)
            return out if self.shared is None else out.add_(self.shared(x))
        self.experts(x, choice, hidden)
        return None if self.shared is None else self.shared(x)


@dataclass(frozen=True, slots=True)
class DenseAndExperts:
    """A feed-forward and experts, which read the residual stream by norms of their own and add their results.

    Every rank routes alike, and norms results that are summed over ranks.

    Attributes:
        dense: the feed-forward, its result normed.
        router_norm, norm: of the residual stream, for the router and for the experts.
        router: which experts a token goes to.
        experts: this rank's part of them.
        routed_norm: of what the experts return.
        output_norm: of the sum of both results.
        parallel: this rank.
    """

    dense: FeedForward
    router_norm: RMSNorm
    norm: RMSNorm
    router: Router
    experts: Experts
    routed_norm: RMSNorm
    output_norm: RMSNorm
    parallel: TensorParallel

    @property
    def kind(self) -> Hashable:
        """What blocks have in common if they launch the same kernels."""
        return self.dense.kind, type(self.experts).__name__, getattr(self.experts, "form", None)

    def __call__(self, hidden: Tensor, delta: Tensor | None, slots: Tensor | None = None) -> Tensor | None:
        """Run the block; arguments and result as for DecoderLayer."""
        out = self.dense(hidden, delta)
        assert out is not None, "the norm of a result is not added to the stream"
        choice = self.router(self.router_norm(hidden), slots)
        routed = self.experts(self.norm(hidden), choice)
        return self.output_norm(out, self.routed_norm(self.parallel.all_reduce(routed)))
