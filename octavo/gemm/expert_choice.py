"""Which experts a token goes to: the operand that makes a product of matrices one of experts."""

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Scoring:
    """How experts are scored and weighed, where that is more than a softmax of logits.

    Attributes:
        is_sigmoid: a score is the sigmoid of its logit, not a softmax over all.
        bias: [E] float32, added to scores for the choice alone, or None.
        groups: experts fall into so many groups, one after the other, and are chosen from so many of them:
            those with the largest sums of two scores; None: from all.
        factor: of a token's weights.
        expert_factors: [E] float32, one more factor of the weights of each expert, or None.
    """

    is_sigmoid: bool = False
    bias: Tensor | None = None
    groups: tuple[int, int] | None = None
    factor: float = 1.0
    expert_factors: Tensor | None = None
