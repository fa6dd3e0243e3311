"""gpt-oss's activation of experts: a gated product with bounded factors.

(up + 1) * gate * sigmoid(SLOPE * gate), with gate <= LIMIT and -LIMIT <= up <= LIMIT
"""

from torch import Tensor

NAME = "clamped_swiglu"
LIMIT = 7.0
SLOPE = 1.702


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return the activation of gate [...] and up [...]."""
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (gate * SLOPE).sigmoid_().mul_(gate).mul_(up + 1)
