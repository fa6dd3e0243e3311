"""What the tests of GEMMs on a GPU share: random tensors, and a chain of kernels that overlap."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton_layer_cases import EPS


def random(*sizes: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    """Normally distributed values on the GPU."""
    return (torch.randn(*sizes, device="cuda") * scale).to(dtype)


class FeedForwards:
    """A chain of fused feed-forwards over one residual stream, each of whose kernels reads the last one's."""

    def __init__(
        self, product: Callable[..., Tensor], num_rows: int, make_weight: Callable[..., Any]
    ) -> None:
        """Keep the fused GEMM, and weights made by (rows of the weight, K, a good scale for bfloat16)."""
        self.product = product
        self.start = random(num_rows, 1024)
        self.hidden = self.start.clone()
        self.layers = [
            (random(1024), make_weight(6144, 1024, 0.03), make_weight(1024, 3072, 0.02)) for _ in range(12)
        ]

    def run(self) -> None:
        """A copy, then fused, ordinary and fused kernels in turn."""
        from octavo.kernels.rms_norm import rms_norm

        product = self.product
        self.hidden.copy_(self.start)
        for norm_weight, gate_up, down in self.layers:
            inner = product(self.hidden, gate_up, norm_weight=norm_weight, eps=EPS, activation="silu")
            product(inner.mul_(0.5), down, residual=self.hidden)
            inner = product(rms_norm(self.hidden, norm_weight, EPS), gate_up, activation="silu")
            product(inner, down, residual=self.hidden)
