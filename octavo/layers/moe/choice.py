"""The one place that chooses how a layer's experts are multiplied.

a layer, when it is made      on a GPU with Triton    stacked
                              elsewhere               listed: linear layers, by linear.choice
each step of a stacked one    1 to 4 tokens           few
                              others                  grouped, tiled by rows per expert
                              deterministic=True      grouped, one tiling
"""

from typing import Literal

from torch import Tensor

from octavo.gpu.device import has_triton

# Each pair of a token and an expert reads its expert's weights. More tokens share experts.
_MAX_FEW = 4

Product = Literal["few", "grouped"]


def stacks_experts(weight: Tensor) -> bool:
    """Return whether experts become one tensor, given a weight of their dtype on their device."""
    return has_triton(weight)


def choose_product(num_tokens: int, *, deterministic: bool) -> Product:
    """Return how the experts of a step's tokens are multiplied. Called per layer and step."""
    return "few" if num_tokens <= _MAX_FEW and not deterministic else "grouped"
