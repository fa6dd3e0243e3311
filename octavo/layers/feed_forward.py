"""The gated feed-forward block."""

from collections.abc import Callable

from torch import Tensor

from octavo.layers.linear import Linear
from octavo.parallel import TensorParallel


class FeedForward:
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(
        self,
        gate_up_proj: Linear,
        down_proj: Linear,
        gated_activation: Callable[[Tensor], Tensor],
        parallel: TensorParallel,
    ) -> None:
        """Keep a rank's share.

        Args:
            gate_up_proj: [T, hidden] to [T, 2 n] = [gate | up].
            down_proj: [T, n] to [T, hidden], a part of the sum over ranks.
            gated_activation: [T, 2 n] to [T, n].
            parallel: this rank.
        """
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self._gated_activation = gated_activation
        self._parallel = parallel

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to a new [T, hidden]."""
        return self._parallel.all_reduce(self.down_proj(self._gated_activation(self.gate_up_proj(x))))
