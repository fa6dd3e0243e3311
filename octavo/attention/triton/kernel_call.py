"""What the Triton attention kernels take: a call's tensors and options, and a step's task map.

The arguments of a call are made for every layer, and with short kernels the host is the bottleneck. So
whatever does not depend on the layer is cached by its plain values. A task map (StepMap) holds the work of
the decode kernel and of the prefill kernel; step_map.py makes it.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from octavo.attention.cache import FLOAT8, LayerCache
from octavo.attention.plan.device_forest import DeviceForest
from octavo.attention.score_options import ScoreOptions
from octavo.attention.tilings.portable import ONE_BLOCK, TileShape, padded_head_dim
from octavo.kernels.launch import varying

LOG2_E = 1.4426950408889634
# Numbers of a unit's record, see step_map.py.
RECORD = tl.constexpr(8)
# From a token's first head to its last one, kernels count elements in 32 bits.
_LARGEST_OFFSET = 2**31 - 1


class Cache(NamedTuple):
    """Pointers and strides (in elements) of a paged cache and its block table, as a kernel takes them.

    table_row: see kernels.launch.varying.
    """

    k: Any
    k_block: Any
    k_token: Any
    k_head: Any
    v: Any
    v_block: Any
    v_token: Any
    v_head: Any
    table: Any
    table_row: Any


class Queries(NamedTuple):
    """Queries with their strides, and the contiguous results beside them."""

    q: Any
    token: Any
    head: Any
    positions: Any
    out: Any
    lse: Any


class Score(NamedTuple):
    """How a score is made: factor = scale * log2(e); see ScoreOptions for the rest.

    window: as shifted positions need it, see ScoreOptions.shift.
    slopes_row, scales_row: elements from one sequence's slopes or scales to the next one's; None: all
        sequences have the same.
    shift: what was added to positions, for a bias by the distance of keys before and after; None: 0.
    """

    factor: Any
    window: Any
    softcap: Any
    slopes: Any
    k_scale: Any
    v_scale: Any
    slopes_row: Any = None
    scales_row: Any = None
    shift: Any = None


class Shape(NamedTuple):
    """Compile-time facts, each a tl.constexpr: sizes, rows and keys of a tile, and which options are on.

    packed: the cache is float8, passed as pairs in int16; see triton/float8.py.
    value_dim, padded_value_dim: head_dim and padded_dim of values and results.
    begins: sequences have a first key that their tokens see, kv begin of their units.
    """

    group: Any
    kv_heads: Any
    head_dim: Any
    padded_dim: Any
    block_size: Any
    rows: Any
    keys: Any
    windowed: Any
    capped: Any
    biased: Any
    scaled: Any
    packed: Any
    value_dim: Any
    padded_value_dim: Any
    begins: Any


class Call(NamedTuple):
    """One call of attention: its tensors and options, and the arguments for kernels made from them.

    Attributes:
        q: [T, H, D] queries.
        layer: the cache.
        options: of the scores.
        queries, cache, score: arguments for kernels.
        block_size: tokens in a block, as kernels are compiled for.
        begins: see Shape.
    """

    q: Tensor
    layer: LayerCache
    options: ScoreOptions
    queries: Queries
    cache: Cache
    score: Score
    block_size: int
    begins: bool

    def shape(self, tile: TileShape) -> Shape:
        """Return the compile-time arguments of a kernel with these tiles."""
        options, (_, _, num_kv_heads, head_dim) = self.options, self.layer.k.shape
        value_dim = self.layer.v.shape[3]
        dtype = torch.float16 if self.layer.k.dtype == FLOAT8 else self.q.dtype
        return _shape(
            group=self.q.shape[1] // num_kv_heads, kv_heads=num_kv_heads, head_dim=head_dim,
            padded_dim=padded_head_dim(head_dim, dtype), block_size=self.block_size, rows=tile.rows,
            keys=tile.keys, windowed=options.window is not None, capped=options.softcap > 0,
            biased=options.alibi_slopes is not None, scaled=self.layer.k_scale is not None,
            packed=self.layer.k.dtype == FLOAT8, value_dim=value_dim,
            padded_value_dim=padded_head_dim(value_dim, dtype), begins=self.begins,
        )  # fmt: skip


def make_call(
    q: Tensor,
    layer: LayerCache,
    positions: Tensor,
    block_table: Tensor,
    options: ScoreOptions,
    results: tuple[Tensor, Tensor],
    *,
    begins: bool = False,
    one_block: bool = False,
) -> Call:
    """Make the arguments of a call.

    Args:
        q: [T, H, D] queries, any strides, last dimension contiguous.
        layer: the cache.
        positions: [T] int32, shifted by options.shift.
        block_table: [S, max_blocks] int32.
        options: of the scores; kernels do not read those that are off.
        results: (out [T, H, Dv], lse [T, H] float32), contiguous; kernels write them.
        begins: the units' first keys are not all 0 or due to a window.
        one_block: each sequence lies within one block.
    """
    if q.stride(1) * q.shape[1] > _LARGEST_OFFSET:
        q = q.contiguous()
    stride_token, stride_head, _ = q.stride()
    k, v = layer.k, layer.v
    if k.dtype == FLOAT8:
        k, v = k.view(torch.int16), v.view(torch.int16)
    return Call(
        q,
        layer,
        options,
        Queries(q, stride_token, stride_head, positions, *results),
        Cache(k, *k.stride()[:3], v, *v.stride()[:3], block_table, varying(block_table.stride(0))),
        _score(layer, options),
        ONE_BLOCK if one_block else k.shape[1],
        begins,
    )


def _score(layer: LayerCache, options: ScoreOptions) -> Score:
    slopes, k_scale = options.alibi_slopes, layer.k_scale
    if slopes is not None and slopes.stride(-1) != 1:
        slopes = slopes.contiguous()
    return Score(
        factor=options.scale * LOG2_E,
        window=options.shifted_window or 0,
        softcap=options.softcap,
        slopes=slopes,
        k_scale=k_scale,
        v_scale=layer.v_scale,
        slopes_row=None if slopes is None or slopes.dim() == 1 else slopes.stride(0),
        scales_row=None if k_scale is None or k_scale.dim() == 1 else k_scale.stride(0),
        shift=None if slopes is None or options.right == 0 else options.shift,
    )


def empty_results(
    q: Tensor, value_dim: int | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Allocate (out [T, H, Dv], lse [T, H] float32), contiguous, not initialised.

    value_dim: Dv; None: as of q.
    dtype: of out; None: that of q.
    """
    num_tokens, num_heads, head_dim = q.shape
    return (
        q.new_empty(num_tokens, num_heads, value_dim or head_dim, dtype=dtype),
        q.new_empty(num_tokens, num_heads, dtype=torch.float32),
    )


class _Constant(tl.constexpr):
    __hash__ = object.__hash__


@functools.lru_cache(maxsize=None, typed=True)
def constant(value: int) -> tl.constexpr:
    """Return a value as a compile-time argument: the same object for equal values.

    In every launch Triton hashes and compares all compile-time arguments to find the compiled kernel. A
    constexpr does both slowly, in Python; hashed and found by its identity, it costs almost nothing.
    """
    return _Constant(value)


@functools.cache
def _shape(**values: int) -> Shape:
    return Shape(**{name: constant(value) for name, value in values.items()})


@dataclass(frozen=True, slots=True)
class DecodeWork:
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
    ) -> "DecodeWork":
        """Allocate the results of pieces."""
        partial_shape = (2 * (schedule.shape[0] - 2), shape.rows, padded_head_dim(value_dim))
        out = torch.empty(partial_shape, dtype=torch.float32, device=units.device)
        lse = torch.empty(partial_shape[:2], dtype=torch.float32, device=units.device)
        return cls(shape, units, schedule, arrivals, out, lse)


@dataclass(frozen=True, slots=True)
class PrefillWork:
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
    ) -> "PrefillWork":
        """Allocate the results [T, H, Dv] of parts, if there are several."""
        partial_shape = (num_parts if num_parts > 1 else 0, *results)
        partial_out = torch.empty(partial_shape, dtype=torch.float32, device=units.device)
        partial_lse = torch.empty(partial_shape[:3], dtype=torch.float32, device=units.device)
        return cls(shape, units, count, num_parts, partial_out, partial_lse, leaves_begin_at=leaves_begin_at)


@dataclass(frozen=True, slots=True)
class StepMap:
    """One step's work for every layer with the same heads and window; see make_step_map.

    Attributes:
        decode: work of sequences with few query tokens (may be none); None in a deterministic step.
        prefill: work of the others, or None if there are none.
        window: of the layers that use the map.
        right: the same, see ScoreOptions.
        positions: [T] int32, shifted by ScoreOptions.shift; those that no sequence covers are undefined.
        covers_all: attending writes the results of every row of q, also of those that no sequence covers.
        forest: shared nodes, whose keys are not among those of decode and prefill, or None.
    """

    decode: DecodeWork | None
    prefill: PrefillWork | None
    window: int | None
    forest: DeviceForest | None
    right: int | None = 0
    positions: Tensor | None = None
    covers_all: bool = True
