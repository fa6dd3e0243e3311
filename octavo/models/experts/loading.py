"""Reads the experts of a layer into one tensor for each projection, for kernels that multiply them so."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.errors import UnsupportedModelError
from octavo.layers.linear.float8.weight import FLOAT8, Float8Weight
from octavo.layers.moe.experts import Experts
from octavo.layers.moe.packed import PackedExperts
from octavo.layers.moe.packed_weight import PackedExpertWeight
from octavo.layers.moe.stacked import StackedExperts
from octavo.layers.moe.weight import SCALED_COLUMNS, ExpertWeight
from octavo.models.checkpoint import Checkpoint
from octavo.models.experts.packing import PackedStack

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def read_stacked(
    checkpoint: Checkpoint,
    names: Sequence[str],
    part: slice | None,
    size: int,
    hidden: int,
    *,
    activation: str,
    deterministic: bool,
) -> Experts:
    """Read all experts of a layer.

    Args:
        checkpoint: where they are read from.
        names: of the experts, such as "model.layers.0.mlp.experts.3".
        part: this rank's rows of gate and up, and columns of down; None: all.
        size: how many these are.
        hidden: width of the residual stream.
        activation: name of the gated activation.
        deterministic: see StackedExperts.

    Raises:
        UnsupportedModelError: experts are stored in different ways, or scales are for numbers of columns that
            kernels do not have.
    """
    gate_up = _make_stack(checkpoint, names, ("gate_proj", "up_proj"), 2 * size, hidden)
    down = _make_stack(checkpoint, names, ("down_proj",), hidden, size)
    for index, name in enumerate(names):
        gate, up, back = (f"{name}.{projection}.weight" for projection in _PROJECTIONS)
        gate_up.read(index, 0, gate, rows=part)
        gate_up.read(index, size, up, rows=part)
        down.read(index, 0, back, columns=part)
    weights = gate_up.weight(), down.weight()
    if isinstance(weights[0], ExpertWeight) and isinstance(weights[1], ExpertWeight):
        return StackedExperts(weights[0], weights[1], activation, deterministic)
    if isinstance(weights[0], PackedExpertWeight) and isinstance(weights[1], PackedExpertWeight):
        return PackedExperts(weights[0], weights[1], activation)
    raise UnsupportedModelError(
        f"{names[0]}: of an expert, either all projections are packed in blocks or none is; use "
        'quantization="none"'
    )


def _make_stack(
    checkpoint: Checkpoint, names: Sequence[str], projections: Sequence[str], num_rows: int, num_columns: int
) -> "_Stack | PackedStack":
    """Return the stack of projections of all experts, which must be stored alike.

    Raises:
        UnsupportedModelError: they are not.
    """
    matrices = [f"{name}.{projection}.weight" for name in names for projection in projections]
    kind = checkpoint.kind_of(matrices[0])
    for matrix in matrices:
        if checkpoint.kind_of(matrix) != kind:
            raise UnsupportedModelError(
                f"{matrix} is stored as {checkpoint.kind_of(matrix) or 'floats'}, {matrices[0]} as "
                f'{kind or "floats"}: experts of a layer must be alike; use quantization="none"'
            )
    if kind == "blocks":
        return PackedStack(checkpoint, len(names), num_rows, len(projections))
    return _Stack(checkpoint, len(names), num_rows, num_columns, is_float8=kind == "float8")


class _Stack:
    """A projection of all experts while it is read: floats, or float8 numbers with scales."""

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
