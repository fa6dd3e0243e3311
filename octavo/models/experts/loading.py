"""Reads the experts of a layer into one tensor for each projection, for kernels that multiply them so."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.errors import UnsupportedModelError
from octavo.forms.float8 import FLOAT8, Float8Weight
from octavo.forms.float_experts import SCALED_COLUMNS, ExpertWeight
from octavo.forms.mxfp4 import MXFP4, Mxfp4Weight
from octavo.forms.mxfp4_experts import (
    LARGEST_EXPONENT,
    Mxfp4ExpertWeight,
    num_spans,
    pack_exponents,
    pack_words,
)
from octavo.forms.packed_experts import PackedExpertWeight
from octavo.gemm.portable.experts.expert_tiling import AnyExpertWeight
from octavo.gemm.stacked_experts import StackedExperts
from octavo.layers.experts import Experts
from octavo.models.checkpoint import Checkpoint
from octavo.models.experts.packing import PackedStack
from octavo.models.weights import Part

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A rank's part of an expert.

    Attributes:
        size: rows of gate and of up, columns of down.
        hidden: width of the residual stream.
        has_bias: projections have biases.
        adds_down_bias: this rank adds that of down, which no other one does.
    """

    size: int
    hidden: int
    has_bias: bool = False
    adds_down_bias: bool = True


def read_stacked(
    checkpoint: Checkpoint,
    names: Sequence[str],
    part: Part,
    shape: ExpertShape,
    *,
    activation: str,
    deterministic: bool,
    num_elsewhere: int = 0,
) -> Experts:
    """Read the experts of a layer that are here.

    Args:
        checkpoint: where they are read from.
        names: of these experts, such as "model.layers.0.mlp.experts.3".
        part: this rank's rows of gate and up, and columns of down; None: all.
        shape: of the part.
        activation: name of the gated activation.
        deterministic, num_elsewhere: see StackedExperts.

    Raises:
        UnsupportedModelError: experts are stored in different ways, or in one that kernels do not have.
    """
    gate_up = _make_stack(checkpoint, names, _PROJECTIONS[:2], 2 * shape.size, shape.hidden)
    down = _make_stack(checkpoint, names, _PROJECTIONS[2:], shape.hidden, shape.size)
    for index, name in enumerate(names):
        gate, up, back = (f"{name}.{projection}.weight" for projection in _PROJECTIONS)
        gate_up.read(index, 0, gate, rows=part)
        gate_up.read(index, shape.size, up, rows=part)
        down.read(index, 0, back, columns=part)
    gate_up_bias = down_bias = None
    if shape.has_bias:
        gate_up_bias, down_bias = _read_biases(checkpoint, names, part)
    weights = gate_up.weight(gate_up_bias), down.weight(down_bias if shape.adds_down_bias else None)
    if isinstance(weights[0], PackedExpertWeight) != isinstance(weights[1], PackedExpertWeight):
        raise UnsupportedModelError(
            f"{names[0]}: of an expert, either all projections are packed in blocks or none is; use "
            'quantization="none"'
        )
    return StackedExperts(*weights, activation, deterministic, num_elsewhere)


def _read_biases(checkpoint: Checkpoint, names: Sequence[str], part: Part) -> tuple[Tensor, Tensor]:
    """Return the biases of [gate | up] and of down, [E, 2 size] and [E, hidden]."""
    pairs = (
        [checkpoint.read(f"{name}.{each}.bias", rows=part) for each in _PROJECTIONS[:2]] for name in names
    )
    gate_up = torch.stack([torch.cat(pair) for pair in pairs])
    return gate_up, torch.stack([checkpoint.read(f"{name}.down_proj.bias") for name in names])


class _Stack(Protocol):
    """A projection of all experts while it is read."""

    def read(self, expert: int, first: int, name: str, *, rows: Part = None, columns: Part = None) -> None:
        """Read a matrix, or a part of it, into an expert's rows from `first` on."""
        ...

    def weight(self, bias: Tensor | None) -> AnyExpertWeight:
        """Return what was read."""
        ...


def _make_stack(
    checkpoint: Checkpoint, names: Sequence[str], projections: Sequence[str], num_rows: int, num_columns: int
) -> _Stack:
    """Return the stack of projections of all experts, which must be stored alike.

    Raises:
        UnsupportedModelError: they are not.
    """
    matrices = [f"{name}.{projection}.weight" for name in names for projection in projections]
    kind = checkpoint.kept_kind(matrices[0])
    for matrix in matrices:
        if checkpoint.kept_kind(matrix) != kind:
            raise UnsupportedModelError(
                f"{matrix} is stored as {checkpoint.kept_kind(matrix) or 'floats'}, {matrices[0]} as "
                f'{kind or "floats"}: experts of a layer must be alike; use quantization="none"'
            )
    if kind == "blocks":
        return PackedStack(checkpoint, len(names), num_rows, len(projections))
    if kind == MXFP4.kind:
        return _Mxfp4Stack(checkpoint, len(names), num_rows, num_columns)
    return _FloatStack(checkpoint, len(names), num_rows, num_columns, is_float8=kind == "float8")


class _Mxfp4Stack:
    """A _Stack of numbers of MXFP4."""

    def __init__(self, checkpoint: Checkpoint, number: int, num_rows: int, num_columns: int) -> None:
        self._checkpoint = checkpoint
        self._size = num_columns
        sizes = number, num_spans(num_columns), num_rows
        self._words = torch.empty(*sizes, 16, dtype=torch.int32, device=checkpoint.device)
        self._exponents = torch.empty(*sizes, dtype=torch.int32, device=checkpoint.device)
        self._largest = 0
        self._first_name = ""

    def read(self, expert: int, first: int, name: str, *, rows: Part = None, columns: Part = None) -> None:
        weight = self._checkpoint.read_quantised(name, rows=rows, columns=columns)
        assert isinstance(weight, Mxfp4Weight), f"{name}: {weight.kind} experts beside others of MXFP4"
        self._first_name = self._first_name or name
        place = slice(first, first + weight.shape[0])
        self._words[expert, :, place] = pack_words(weight.values)
        self._exponents[expert, :, place] = pack_exponents(weight.exponents)
        self._largest = max(self._largest, int(weight.exponents.max()))

    def weight(self, bias: Tensor | None) -> Mxfp4ExpertWeight:
        if self._largest > LARGEST_EXPONENT:
            raise UnsupportedModelError(
                f"{self._first_name} and other experts have scales above 2, which the GPU's kernels do not "
                'support; use quantization="none"'
            )
        return Mxfp4ExpertWeight(self._size, self._words, self._exponents, bias)


class _FloatStack:
    """A _Stack of numbers of the checkpoint's dtype, or float8."""

    def __init__(
        self, checkpoint: Checkpoint, number: int, num_rows: int, num_columns: int, *, is_float8: bool
    ) -> None:
        self._checkpoint = checkpoint
        self._is_float8 = is_float8
        dtype = FLOAT8 if is_float8 else checkpoint.dtype
        self._values = torch.empty(number, num_rows, num_columns, dtype=dtype, device=checkpoint.device)
        self._scales: Tensor | None = None
        self._width = 0

    def read(self, expert: int, first: int, name: str, *, rows: Part = None, columns: Part = None) -> None:
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

    def weight(self, bias: Tensor | None) -> ExpertWeight:
        return ExpertWeight(self._values, self._scales, self._width, bias)

    def _scales_of(self, name: str, weight: Float8Weight) -> Tensor:
        """The scales of all experts: the first one says for how many columns each is."""
        number, num_rows, num_columns = self._values.shape
        if self._scales is None:
            self._width = weight.width
            num_parts = -(-num_columns // weight.width)
            self._scales = torch.empty(
                number, num_parts, num_rows, dtype=torch.float32, device=self._values.device
            )
        if weight.width != self._width or (weight.width < num_columns and weight.width % SCALED_COLUMNS):
            raise UnsupportedModelError(
                f"{name}: scales must be for whole rows or a multiple of {SCALED_COLUMNS} columns, for all "
                f'experts alike, got {weight.width} and {self._width} columns; use quantization="none"'
            )
        return self._scales
