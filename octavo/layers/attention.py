"""The attention layer: project, normalise heads, rotate, store, attend, project back."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from octavo.layers.block import BlockInput, BlockOutput
from octavo.layers.layer_options import LayerOptions
from octavo.layers.norm import WideQKNorm
from octavo.layers.steps.operator_step import AttentionStep


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One rank's attention heads of one layer.

    Attributes:
        qkv_proj: to [T, (num_heads + 2 num_kv_heads) * D]: q heads, k heads, v heads, the halves of q and k
            interleaved (see rotary).
        o_proj: from [T, num_heads * D].
        options: the layer's settings.
        wide_norm: norm of queries and of keys over all heads, or None.
    """

    qkv_proj: BlockInput
    o_proj: BlockOutput
    options: LayerOptions
    wide_norm: WideQKNorm | None = None

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, rotations: Sequence[Tensor], step: AttentionStep
    ) -> Tensor | None:
        """Run the block; arguments and result as for DecoderLayer."""
        qkv = self.qkv_proj(hidden, delta)
        if self.wide_norm is not None:
            self.wide_norm.apply_(qkv)
        return self.o_proj(step.attend(qkv, rotations[self.options.rope], self.options), hidden)
