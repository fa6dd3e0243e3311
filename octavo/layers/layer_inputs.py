"""Embeddings that each layer has of a token, beside the one that begins the residual stream."""

import math
from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from octavo.gemm.gated import ACTIVATIONS
from octavo.gemm.linear import Linear
from octavo.layers.block import BlockInput, BlockOutput
from octavo.layers.embedding import Embedding
from octavo.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The mean, but for a factor of sqrt(2), of a table's rows and of a projection of the residual stream.

    Every rank computes all of it.

    Attributes:
        embedding: ids to [T, L * P], P numbers for each of L layers.
        projection: [T, hidden] to [T, L * P].
        norm: of the P numbers of a layer, projected; its eps is for the projection as it is.
    """

    embedding: Embedding
    projection: Linear
    norm: RMSNorm

    def __call__(self, input_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return [T, L, P] of ids [T] and their embeddings [T, hidden], which stay as they are."""
        size = self.norm.weight.shape[0]
        projected = self.norm(self.projection(hidden).view(-1, size))
        total = self.embedding(input_ids).view(-1, size).add_(projected).mul_(math.sqrt(0.5))
        return total.view(len(hidden), -1, size)


@dataclass(frozen=True, slots=True)
class InputBlock:
    """A block that lets the residual stream choose from the layer's own embeddings.

    Attributes:
        gate: [T, hidden] to [T, P], without a norm.
        activation: name of that of the gate.
        output: [T, P] to [T, hidden].
    """

    gate: BlockInput
    activation: str
    output: BlockOutput

    @property
    def kind(self) -> Hashable:
        """What blocks have in common if they launch the same kernels."""
        return self.gate.kind, self.output.kind

    def __call__(self, hidden: Tensor, delta: Tensor | None, layer_input: Tensor) -> Tensor | None:
        """Run the block; arguments and result as for DecoderLayer."""
        gate = ACTIVATIONS[self.activation](self.gate(hidden, delta))
        return self.output(gate.mul_(layer_input), hidden)
