"""The gated feed-forward block."""

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from octavo.layers.block import BlockInput, BlockOutput


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(activation(gate(x)) * up(x)), gate and up in one product.

    Attributes:
        gate_up_proj: to [T, n], the gated activation of this rank's [gate | up].
        down_proj: from [T, n].
    """

    gate_up_proj: BlockInput
    down_proj: BlockOutput

    @property
    def kind(self) -> Hashable:
        """What blocks have in common if they launch the same kernels."""
        return self.gate_up_proj.kind, self.down_proj.kind

    def __call__(self, hidden: Tensor, delta: Tensor | None) -> Tensor | None:
        """Run the block; arguments and result as for DecoderLayer."""
        return self.down_proj(self.gate_up_proj(hidden, delta), hidden)
