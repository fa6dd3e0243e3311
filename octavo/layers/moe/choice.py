"""The one place that chooses how a layer's experts are multiplied.

    a layer, when it is made      on a GPU with Triton: stacked      elsewhere: listed, linear layers by linear.choice
    each step of a stacked one    1 to 4 tokens: few                 others: grouped
                                  deterministic=True: grouped, one tiling
"""

from typing import Literal

# Each pair of a token and an expert reads its expert's weights. More tokens share experts.
_MAX_FEW = 4

Product = Literal["few", "grouped"]


def choose_product(num_tokens: int, *, deterministic: bool) -> Product:
    """Return how the experts of a step's tokens are multiplied. Called per layer and step."""
    return "few" if num_tokens <= _MAX_FEW and not deterministic else "grouped"
