"""A projection of all experts of a layer in one tensor, perhaps of float8 numbers with scales."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.device import nvidia_generation

# Kernels multiply so many columns at a time, which share a row's scale.
SCALED_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """Weights [E, N, K]: values, or values times scales.

    Attributes:
        values: [E, N, K] contiguous, of the dtype of activations, or float8_e4m3fn.
        scales: [E, K / width, N] float32 contiguous, or None.
        width: numbers of a row that share a scale; K, or a multiple of SCALED_COLUMNS.
        bias: [E, N] contiguous, or None.
    """

    values: Tensor
    scales: Tensor | None = None
    width: int = 0
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        number, rows, columns = self.values.shape
        return number, rows, columns

    @property
    def form(self) -> Hashable:
        """What decides, beside sizes, which kernels multiply it."""
        return self.values.dtype, self.width, self.bias is not None

    def dequantise(self) -> Tensor:
        """Return the weights [E, N, K] float32."""
        values = self.values.float()
        if self.scales is None:
            return values
        scales = self.scales.transpose(1, 2).repeat_interleave(self.width, 2)
        return values * scales[..., : values.shape[2]]


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why float8 experts cannot be multiplied by x of a dtype on a GPU, or None if they can."""
    generation = nvidia_generation(device)
    return None if generation >= 9 else f"float8 experts need compute capability 9.0, got {generation}.x"
