"""The feed-forward block of a mixture of experts."""

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from octavo.layers.experts import Experts
from octavo.layers.norm import RMSNorm
from octavo.layers.router import Router
from octavo.parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class ExpertFeedForward:
    """Routes each token of the normed residual stream to its experts.

    Every rank routes alike, and holds a part of every expert, or some experts whole.

    Attributes:
        norm: of the residual stream.
        router: which experts a token goes to.
        experts: this rank's part of them.
        parallel: this rank.
    """

    norm: RMSNorm
    router: Router
    experts: Experts
    parallel: TensorParallel

    @property
    def kind(self) -> Hashable:
        """What blocks have in common if they launch the same kernels."""
        return type(self.experts).__name__, getattr(self.experts, "form", None)

    def __call__(self, hidden: Tensor, delta: Tensor | None, slots: Tensor | None = None) -> Tensor | None:
        """Run the block; arguments and result as for DecoderLayer."""
        if delta is None:
            x, choice = self.router.from_stream(hidden, self.norm, slots)
        else:
            x = self.norm(hidden, delta)
            choice = self.router(x, slots)
        if self.parallel.size > 1:
            return self.experts(x, choice)
        self.experts(x, choice, hidden)
        return None
