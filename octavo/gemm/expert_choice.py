"""Which experts a token goes to: the operand that makes a product of matrices one of experts."""

from typing import NamedTuple

from torch import Tensor


class Choice(NamedTuple):
    """The experts of a step's tokens; the order of a token's experts is the order of its sum.

    Attributes:
        experts: [T, k] int32, each token's experts, the most probable one first. 0 to E - 1 are held here:
            all experts, unless ranks hold whole ones. E is none: an expert of another rank, or padding's.
        weights: [T, k] float32, factors of their results.
    """

    experts: Tensor
    weights: Tensor
