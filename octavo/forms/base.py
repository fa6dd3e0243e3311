"""Quantised weights: small numbers, and the scales that make weights of them.

    kind      what is stored                                       module
    blocks    integers of 4 or 8 bits share a scale and a min      blocks.{weight,stored}, grouped.weight
    float8    float8 (e4m3) numbers; a scale for a row or a tile   float8.weight
    mxfp4     4-bit floats; a power of two for 32 of a row         mxfp4.weight

A format of checkpoints hands out such weights (models.weights.QuantisedSource), and gemm.table makes
layers that multiply them as they are. To add a kind: a file with its weight; a file with its layers, which
has `unsupported_reason(device, dtype)`, `make_layer(weights, bias)` and a DESCRIPTION; a name in _LAYERS of
gemm.table.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor


class LayerWeight(Protocol):
    """What a layer is made of: a QuantisedWeight, or one that lies in a kernel's order already."""

    @property
    def kind(self) -> str:
        """Name by which gemm.table finds layers."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weight lives."""
        ...


class QuantisedWeight(LayerWeight, Protocol):
    """A weight [N, K]. Rows can be cut, reordered and joined without touching a number."""

    @property
    def form(self) -> Hashable:
        """What weights of a kind must have in common to be joined."""
        ...

    def take(self, rows: Tensor) -> Self:
        """Return rows [n] int64 in a new order."""
        ...

    def join(self, below: Self) -> Self:
        """Return the rows of this weight above those of another one of its form."""
        ...

    def to(self, device: torch.device) -> Self:
        """Return the weight on a device."""
        ...

    def dequantise(self) -> Tensor:
        """Return the weight [N, K] float32."""
        ...


@dataclass(frozen=True, slots=True)
class Storage:
    """How much memory a quantised weight takes; known before it is read.

    Attributes:
        kind: that of QuantisedWeight.
        bytes_per_number: bytes of a number, with scales that are shared along a row.
        bytes_per_row: bytes of scales that each row has besides.
        bytes_on_gpu: bytes_per_number on a GPU, where that is another number.
        form: how the checkpoint stores it, for people: "Q4_K", "4 bits in groups of 128".
    """

    kind: str
    bytes_per_number: float
    bytes_per_row: float = 0.0
    bytes_on_gpu: float | None = None
    form: str = ""

    def nbytes(self, shape: Sequence[int]) -> float:
        """Return the bytes of a weight [N, K]."""
        return prod(shape) * self.bytes_per_number + shape[0] * self.bytes_per_row


Weight = TypeVar("Weight", bound=QuantisedWeight)


def join_rows(weights: Iterable[Weight]) -> list[Weight]:
    """Join neighbours of one form: what is left is the fewest weights that make the same rows."""
    joined: list[Weight] = []
    for weight in weights:
        if joined and joined[-1].form == weight.form:
            joined[-1] = joined[-1].join(weight)
        else:
            joined.append(weight)
    return joined
