"""The attention layer: project, normalise heads, rotate, store, attend, project back."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from octavo.layers.block import BlockInput, BlockOutput
from octavo.layers.layer_options import LayerOptions
from octavo.layers.steps.operators import AttentionStep


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One rank's attention heads of one layer.

    Attributes:
        qkv_proj: to [T, (num_heads + 2 num_kv_heads) * D]: q heads, k heads, v heads, the halves of q and k
            interleaved (see rotary).
        o_proj: from [T, num_heads * D].
        options: what attention needs to know of the layer.
    """

    qkv_proj: BlockInput
    o_proj: BlockOutput
    options: LayerOptions

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, rotations: Sequence[Tensor], step: AttentionStep
    ) -> Tensor | None:
        """Attend.

        Args:
            hidden: [T, hidden] residual stream; mutated.
            delta: [T, hidden] still to be added to it, or None.
            rotations: the step's, one per rope of the network.
            step: attention over the cache; this step's keys and values are written to it.

        Returns:
            [T, hidden] still to be added to the residual stream, or None.
        """
        qkv = self.qkv_proj(hidden, delta)
        return self.o_proj(step.attend(qkv, rotations[self.options.rope], self.options), hidden)
