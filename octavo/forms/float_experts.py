"""A projection of all experts of a layer in one tensor, perhaps of float8 numbers with scales."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.errors import UnsupportedModelError
from octavo.forms.base import StackShape, Storage
from octavo.forms.float8 import FLOAT8, Float8Weight

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
    def kind(self) -> str:
        """See ExpertsWeight."""
        return "floats" if self.scales is None else "float8"

    @property
    def device(self) -> torch.device:
        """See ExpertsWeight."""
        return self.values.device

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


class FloatStack:
    """An ExpertStack of numbers of the dtype of activations."""

    def __init__(self, shape: StackShape) -> None:
        """Take memory."""
        self._weight = self.blank(shape)

    @classmethod
    def blank(cls, shape: StackShape, storage: Storage | None = None) -> ExpertWeight:
        """Return weights whose numbers are not set: what decides by which products they are multiplied."""
        sizes = shape.number, shape.rows, shape.columns
        return ExpertWeight(torch.empty(sizes, dtype=shape.dtype, device=shape.device))

    def put(self, name: str, expert: int, first: int, weight: Tensor) -> None:
        """See ExpertStack."""
        self._weight.values[expert, first : first + len(weight)] = weight

    def finish(self, bias: Tensor | None) -> ExpertWeight:
        """See ExpertStack."""
        return replace(self._weight, bias=bias)


class Float8Stack:
    """An ExpertStack of float8 numbers; the first matrix says for how many columns a scale is."""

    def __init__(self, shape: StackShape) -> None:
        """Take memory for numbers."""
        sizes = shape.number, shape.rows, shape.columns
        self._values = torch.empty(sizes, dtype=FLOAT8, device=shape.device)
        self._stacked: ExpertWeight | None = None

    @classmethod
    def blank(cls, shape: StackShape, storage: Storage) -> ExpertWeight:
        """Return weights whose numbers are not set: what decides by which products they are multiplied."""
        return cls(shape)._with_scales(storage.tile[1] or shape.columns)

    def _with_scales(self, width: int) -> ExpertWeight:
        number, rows, columns = self._values.shape
        sizes = number, -(-columns // width), rows
        return ExpertWeight(self._values, self._values.new_empty(sizes, dtype=torch.float32), width)

    def put(self, name: str, expert: int, first: int, weight: Float8Weight) -> None:
        """See ExpertStack.

        Raises:
            UnsupportedModelError: scales are for other numbers of columns than before, or for parts of what
                kernels multiply at a time.
        """
        assert isinstance(weight, Float8Weight), f"{name}: {weight.kind} experts are not stacked"
        if self._stacked is None:
            self._stacked = self._with_scales(weight.width)
        num_rows, num_columns, width = *weight.shape, self._stacked.width
        if weight.width != width or (weight.width < num_columns and weight.width % SCALED_COLUMNS):
            raise UnsupportedModelError(
                f"{name}: scales must be for whole rows or a multiple of {SCALED_COLUMNS} columns, for all "
                f'experts alike, got {weight.width} and {width} columns; use quantization="none"'
            )
        rows, scales = slice(first, first + num_rows), self._stacked.scales
        assert scales is not None, "float8 without scales"
        self._values[expert, rows] = weight.values
        scales[expert, :, rows] = weight.scales.repeat_interleave(weight.height, 0)[:num_rows].T

    def finish(self, bias: Tensor | None) -> ExpertWeight:
        """See ExpertStack."""
        assert self._stacked is not None, "no matrix was read"
        return replace(self._stacked, bias=bias)
