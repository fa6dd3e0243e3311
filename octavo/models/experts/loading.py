"""Reads the experts of a layer into one tensor for each projection, for kernels that multiply them so."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedModelError
from octavo.forms.base import ExpertStack, StackShape
from octavo.gemm.stacked_experts import StackedExperts
from octavo.gemm.table import EXPERT_LAYERS
from octavo.layers.experts import Experts
from octavo.models.checkpoint import Checkpoint
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
    options = {"dtype": checkpoint.dtype, "device": checkpoint.device}
    up_shape = StackShape(len(names), 2 * shape.size, shape.hidden, 2, **options)
    down_shape = StackShape(len(names), shape.hidden, shape.size, 1, **options)
    gate_up = _make_stack(checkpoint, names, _PROJECTIONS[:2], up_shape)
    down = _make_stack(checkpoint, names, _PROJECTIONS[2:], down_shape)
    for index, name in enumerate(names):
        gate, up, back = (f"{name}.{projection}.weight" for projection in _PROJECTIONS)
        gate_up.put(gate, index, 0, _read(checkpoint, gate, rows=part))
        gate_up.put(up, index, shape.size, _read(checkpoint, up, rows=part))
        down.put(back, index, 0, _read(checkpoint, back, columns=part))
    gate_up_bias = down_bias = None
    if shape.has_bias:
        gate_up_bias, down_bias = _read_biases(checkpoint, names, part)
    weights = gate_up.finish(gate_up_bias), down.finish(down_bias if shape.adds_down_bias else None)
    if "packed" in (kinds := {weight.kind for weight in weights}) and len(kinds) > 1:
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


def _make_stack(
    checkpoint: Checkpoint, names: Sequence[str], projections: Sequence[str], shape: StackShape
) -> ExpertStack:
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
    return EXPERT_LAYERS[kind or "floats"].blank(shape)


def _read(checkpoint: Checkpoint, name: str, *, rows: Part = None, columns: Part = None) -> Any:
    """Return a matrix, or a part of it, as the checkpoint keeps it."""
    read = checkpoint.read_quantised if checkpoint.stays_quantised(name) else checkpoint.read
    return read(name, rows=rows, columns=columns)
