"""Linear layers on CPUs whose weight is rounded to 8 bits: blocks of 32 numbers with a scale each.

They run as weights do that a checkpoint stores in blocks (gemm.cpu.block_linear).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.forms.blocks import BLOCK, BlockWeight
from octavo.gemm.cpu import block_linear as blocks
from octavo.gemm.cpu.block_linear import BlockLinear
from octavo.gemm.linear import UnfusedLinear

# Bytes that a number of the weight takes, its share of the block's scale included.
BYTES_PER_NUMBER = 1 + 4 / BLOCK
_LIMIT = 127


class PaddedLinear(UnfusedLinear):
    """y = x W^T + b with zeros behind the columns of W, and so of x."""

    def __init__(self, layer: BlockLinear, num_columns: int) -> None:
        """Keep a layer and how many zeros it has."""
        self._layer = layer
        self._num_columns = num_columns

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        return self._layer(pad(x, (0, self._num_columns)))


def make_layer(weight: Tensor, bias: Tensor | None) -> BlockLinear | PaddedLinear:
    """Return the layer of weight [N, K] float32, rounded, and bias [N] float32."""
    padding = -weight.shape[1] % BLOCK
    if padding:
        return PaddedLinear(blocks.make_layer([rounded(pad(weight, (0, padding)))], bias), padding)
    return blocks.make_layer([rounded(weight)], bias)


def rounded(weight: Tensor) -> BlockWeight:
    """Round a weight [N, K] float32; numbers are off by half a 127th of their block's largest one at most."""
    parts = weight.unflatten(1, (-1, BLOCK))
    scales = parts.abs().amax(-1) / _LIMIT
    # A block of zeros has the scale 0.
    quants = (parts / scales.where(scales != 0, 1)[..., None]).round_().to(torch.int8)
    return BlockWeight(8, quants.flatten(1), scales, None)
