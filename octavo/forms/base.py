"""What all quantised weights can do: small numbers, and the scales that make weights of them.

A format of checkpoints hands such weights out (models.weights.QuantisedSource), and the rows of gemm.table
say which layer multiplies a kind of them and by which products.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, Self, TypeVar

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


class ExpertsWeight(Protocol):
    """A projection of all experts of a layer, [E, N, K], as a GPU's kernels read it."""

    @property
    def kind(self) -> str:
        """Name by which gemm.table finds products."""
        ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the weight lives."""
        ...

    @property
    def form(self) -> Hashable:
        """What decides, beside sizes, which kernels multiply it."""
        ...


class ExpertStack(Protocol):
    """A projection of all experts of a layer while it is read, one matrix at a time."""

    def put(self, name: str, expert: int, first: int, weight: Any) -> None:
        """Copy a matrix into an expert's rows from `first` on; `name` is for errors."""
        ...

    def finish(self, bias: Tensor | None) -> ExpertsWeight:
        """Return what was put; bias: [E, N] or None."""
        ...


@dataclass(frozen=True, slots=True)
class StackShape:
    """What an ExpertStack must hold.

    Attributes:
        number: E.
        rows: N.
        columns: K.
        parts: equal parts of the rows, each a matrix of its own: 2 for [gate | up].
        dtype: of activations, and of weights that are not quantised.
        device: of the weights.
    """

    number: int
    rows: int
    columns: int
    parts: int
    dtype: torch.dtype
    device: torch.device


def weight_kind(weight: Any) -> str:
    """Return the name by which gemm.table finds the products of a weight; a tensor is "floats"."""
    return getattr(weight, "kind", "floats")


@dataclass(frozen=True, slots=True)
class Storage:
    """How much memory a quantised weight takes; known before it is read.

    Attributes:
        kind: that of QuantisedWeight.
        bytes_per_number: bytes of a number, with scales that are shared along a row.
        bytes_per_row: bytes of scales that each row has besides.
        bytes_on_gpu: bytes_per_number on a GPU, where that is another number.
        form: how the checkpoint stores it, for people: "Q4_K", "4 bits in groups of 128".
        bits: of a number.
        tile: rows and columns of numbers that share a scale; 0 columns: all of a row.
    """

    kind: str
    bytes_per_number: float
    bytes_per_row: float = 0.0
    bytes_on_gpu: float | None = None
    form: str = ""
    bits: int = 8
    tile: tuple[int, int] = (1, 0)

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
