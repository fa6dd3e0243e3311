"""Reads the experts of a layer into one tensor for each projection, for kernels that multiply them so."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.errors import UnsupportedModelError
from octavo.layers.linear.float8.weight import FLOAT8, Float8Weight
from octavo.layers.moe.weight import SCALED_COLUMNS, ExpertWeight
from octavo.models.checkpoint import Checkpoint

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def read_stacked(
    checkpoint: Checkpoint, names: Sequence[str], part: slice | None, size: int, hidden: int
) -> tuple[ExpertWeight, ExpertWeight]:
    """Read [gate | up] and down of all experts of a layer.

    Args:
        checkpoint: where they are read from.
        names: of the experts, such as "model.layers.0.mlp.experts.3".
        part: this rank's rows of gate and up, and columns of down; None: all.
        size: how many these are.
        hidden: width of the residual stream.

    Returns:
        [E, 2 size, hidden] and [E, hidden, size]; float8 where that stays so.

    Raises:
        UnsupportedModelError: scales are for numbers of columns that kernels do not have.
    """
    is_float8 = checkpoint.stays_quantised(f"{names[0]}.gate_proj.weight")
    is_down_float8 = checkpoint.stays_quantised(f"{names[0]}.down_proj.weight")
    gate_up = _Stack(checkpoint, len(names), 2 * size, hidden, is_float8=is_float8)
    down = _Stack(checkpoint, len(names), hidden, size, is_float8=is_down_float8)
    for index, name in enumerate(names):
        gate, up, back = (f"{name}.{projection}.weight" for projection in _PROJECTIONS)
        gate_up.read(index, 0, gate, rows=part)
        gate_up.read(index, size, up, rows=part)
        down.read(index, 0, back, columns=part)
    return gate_up.weight(), down.weight()


class _Stack:
    """A projection of all experts while it is read."""

    def __init__(
        self, checkpoint: Checkpoint, number: int, num_rows: int, num_columns: int, *, is_float8: bool
    ) -> None:
        self._checkpoint = checkpoint
        self._is_float8 = is_float8
        dtype = FLOAT8 if is_float8 else checkpoint.dtype
        self._values = torch.empty(number, num_rows, num_columns, dtype=dtype, device=checkpoint.device)
        self._scales: Tensor | None = None
        self._width = 0

    def read(
        self, expert: int, first: int, name: str, *, rows: slice | None = None, columns: slice | None = None
    ) -> None:
        """Read a matrix, or a part of it, into an expert's rows from `first` on."""
        if not self._is_float8:
            matrix = self._checkpoint.read(name, rows=rows, columns=columns)
            self._values[expert, first : first + matrix.shape[0]] = matrix
            return
        weight = self._checkpoint.read_quantised(name, rows=rows, columns=columns)
        assert isinstance(weight, Float8Weight), f"{name}: {weight.kind} experts are not stacked"
        num_rows = weight.shape[0]
        self._values[expert, first : first + num_rows] = weight.values
        scales = self._scales_of(name, weight)
        parts = weight.scales.repeat_interleave(weight.height, 0)[:num_rows]
        scales[expert, :, first : first + num_rows] = parts.T

    def weight(self) -> ExpertWeight:
        """Return what was read."""
        return ExpertWeight(self._values, self._scales, self._width)

    def _scales_of(self, name: str, weight: Float8Weight) -> Tensor:
        """The scales of all experts: the first one says for how many columns each is."""
        number, num_rows, num_columns = self._values.shape
        if self._scales is None:
            self._width = weight.width
            num_parts = -(-num_columns // weight.width)
            self._scales = torch.empty(number, num_parts, num_rows, device=self._values.device)
        if weight.width != self._width or (weight.width < num_columns and weight.width % SCALED_COLUMNS):
            raise UnsupportedModelError(
                f"{name}: scales must be for whole rows or a multiple of {SCALED_COLUMNS} columns, for all "
                f'experts alike, got {weight.width} and {self._width} columns; use quantization="none"'
            )
        return self._scales
