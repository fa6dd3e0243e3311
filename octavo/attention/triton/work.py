"""What a step's task map holds: the work of the decode kernel and of the prefill kernel; see step_map.py."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention.plan.device_forest import DeviceForest
from octavo.attention.tilings.portable import TileShape, padded_head_dim


@dataclass(frozen=True, slots=True)
class ThinWork:
    """Work of the decode kernel: each program attends an equal number of key tiles.

    Attributes:
        shape: how the kernel is tiled.
        units: [U, 8] int32 records.
        schedule: [2 + P] int32: tiles per program, tiles in all, then each program's first unit.
        arrivals: [U, KH] int32, finished pieces of a (unit, kv head); 0 between calls.
        partial_out: [2P, rows, padded dim] float32, results of pieces.
        partial_lse: [2P, rows] float32, in units of log 2.
    """

    shape: TileShape
    units: Tensor
    schedule: Tensor
    arrivals: Tensor
    partial_out: Tensor
    partial_lse: Tensor

    @classmethod
    def allocate(
        cls, shape: TileShape, units: Tensor, schedule: Tensor, arrivals: Tensor, value_dim: int
    ) -> "ThinWork":
        """Allocate the results of pieces."""
        partial_shape = (2 * (schedule.shape[0] - 2), shape.rows, padded_head_dim(value_dim))
        out = torch.empty(partial_shape, dtype=torch.float32, device=units.device)
        lse = torch.empty(partial_shape[:2], dtype=torch.float32, device=units.device)
        return cls(shape, units, schedule, arrivals, out, lse)


@dataclass(frozen=True, slots=True)
class FatWork:
    """Work of the prefill kernel: one program for each (unit, kv head, part of its keys).

    Attributes:
        shape: how the kernel is tiled.
        units: [U, 8] int32 records; the last ones may be empty.
        count: [1] int32, how many are not.
        num_parts: programs that share the keys of a unit.
        partial_out: [parts, T, H, D] float32, results of parts; empty with a single part.
        partial_lse: [parts, T, H] float32, in units of log 2.
        row_invariant: a row's result must not depend on the other rows of its tile.
        leaves_begin_at: units beside nodes begin at multiples of so many keys; 0: there are no nodes.
    """

    shape: TileShape
    units: Tensor
    count: Tensor
    num_parts: int
    partial_out: Tensor
    partial_lse: Tensor
    row_invariant: bool = False
    leaves_begin_at: int = 0

    @classmethod
    def allocate(
        cls,
        shape: TileShape,
        units: Tensor,
        count: Tensor,
        num_parts: int,
        results: tuple[int, int, int],
        leaves_begin_at: int = 0,
    ) -> "FatWork":
        """Allocate the results [T, H, Dv] of parts, if there are several."""
        partial_shape = (num_parts if num_parts > 1 else 0, *results)
        partial_out = torch.empty(partial_shape, dtype=torch.float32, device=units.device)
        partial_lse = torch.empty(partial_shape[:3], dtype=torch.float32, device=units.device)
        return cls(shape, units, count, num_parts, partial_out, partial_lse, leaves_begin_at=leaves_begin_at)


@dataclass(frozen=True, slots=True)
class StepMap:
    """One step's work for every layer with the same heads and window; see plan_step.

    Attributes:
        thin: work of sequences with few query tokens (may be none); None in a deterministic step.
        fat: work of the others, or None if there are none.
        window: of the layers that use the map.
        right: the same, see ScoreOptions.
        positions: [T] int32, shifted by ScoreOptions.shift; those that no sequence covers are undefined.
        covers_all: attending writes the results of every row of q, also of those that no sequence covers.
        forest: shared nodes, whose keys are not among those of thin and fat, or None.
    """

    thin: ThinWork | None
    fat: FatWork | None
    window: int | None
    forest: DeviceForest | None
    right: int | None = 0
    positions: Tensor | None = None
    covers_all: bool = True
