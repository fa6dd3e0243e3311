"""A step's attention where groups of layers have block tables of their own."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from octavo.layers.layer_options import LayerOptions
from octavo.layers.rotary import Rotary
from octavo.layers.steps.operator_step import AttentionStep


@dataclass(frozen=True, slots=True)
class GroupedStep:
    """AttentionStep that hands each layer to the step of its group.

    Attributes:
        of_layers: the step of each layer of the cache. All of them are of one class.
    """

    of_layers: Mapping[int, AttentionStep]

    def rotations(self, rope: Rotary, positions: Tensor) -> Tensor:
        """See AttentionStep."""
        return next(iter(self.of_layers.values())).rotations(rope, positions)

    def attend(self, qkv: Tensor, rotations: Tensor, options: LayerOptions) -> Tensor:
        """See AttentionStep."""
        return self.of_layers[options.layer].attend(qkv, rotations, options)
