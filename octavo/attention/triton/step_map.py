"""The step's task map, made on the device: which queries read which keys, and how programs divide the work.

A unit is a tile of one sequence's query tokens and the keys they see. Units with few rows (decoding) are
thin, the others are fat. Each class has its own kernel: a single kernel would need the registers of the
larger. Nothing here waits for the device, so a CUDA graph can contain the making of a map. units.py
describes the records.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention.choice import decode_tile, whole_unit_programs
from octavo.attention.float8 import FLOAT8
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.options import ScoreOptions
from octavo.attention.plan.device_forest import DeviceForest
from octavo.attention.triton import shapes
from octavo.attention.triton.shapes import TileShape, fat_shape, padded_head_dim
from octavo.attention.triton.units import RECORD, list_units_kernel, schedule_kernel
from octavo.gpu.device import num_multiprocessors, power_of_two
from octavo.gpu.launch import launch

# One warp merges the pieces of a thin unit, at more than a microsecond each.
MOST_PIECES = 16
# Splitting a fat unit into parts with fewer keys would cost more than it saves.
_MIN_SPLIT_KEYS = 512
_MOST_PARTS = 256


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
        partial_out = torch.empty(partial_shape, dtype=torch.float32, device=units.device)
        partial_lse = torch.empty(partial_shape[:2], dtype=torch.float32, device=units.device)
        return cls(shape, units, schedule, arrivals, partial_out, partial_lse)


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
    """

    shape: TileShape
    units: Tensor
    count: Tensor
    num_parts: int
    partial_out: Tensor
    partial_lse: Tensor
    row_invariant: bool = False

    @classmethod
    def allocate(
        cls, shape: TileShape, units: Tensor, count: Tensor, num_parts: int, results: tuple[int, int, int]
    ) -> "FatWork":
        """Allocate the results [T, H, Dv] of parts, if there are several."""
        partial_shape = (num_parts if num_parts > 1 else 0, *results)
        partial_out = torch.empty(partial_shape, dtype=torch.float32, device=units.device)
        partial_lse = torch.empty(partial_shape[:3], dtype=torch.float32, device=units.device)
        return cls(shape, units, count, num_parts, partial_out, partial_lse)


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


@dataclass(frozen=True, slots=True)
class _Visibility:
    """Limits of the keys that a unit sees.

    Attributes:
        options: of the layers; only window and right are read.
        positions: [T] int32, to be written where they are shifted.
        leaf_begin: [S] int32 tokens that nodes cover, or None.
    """

    options: ScoreOptions
    positions: Tensor
    leaf_begin: Tensor | None = None


def plan_step(
    metadata: AttentionMetadata,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 1,
    window: int | None = None,
    thin: TileShape | None = None,
    fat: TileShape | None = None,
    deterministic: bool = False,
    right: int | None = 0,
    num_splits: int = 0,
    value_dim: int | None = None,
) -> StepMap:
    """Make a step's task map on the device, without waiting for it.

    Args:
        metadata: the step; layers without a window use its forest.
        num_tokens: T, rows of q.
        num_heads: H.
        num_kv_heads: KH.
        head_dim: D.
        dtype: of queries.
        cache_dtype: None: that of the queries.
        block_size: tokens in a block of the cache; 1: unknown.
        window: of the layers that will use the map.
        thin, fat: tilings; None: the fastest measured.
        deterministic: no bit of a token's result may depend on the other tokens of the step. Then all units
            are fat, no keys are split or shared, and tokens of q that belong to no sequence get no result.
        right: of the layers, see ScoreOptions.
        num_splits: parts that a query's keys are read in; 0: the fastest.
        value_dim: Dv; None: D.

    Returns:
        The map. Calls that use it must run one after another, because they share its buffers.

    Raises:
        InvalidArgumentError: the forest is for other heads or fewer tokens.
    """
    group = num_heads // num_kv_heads
    cache_dtype = cache_dtype or dtype
    product_dtype = torch.float16 if cache_dtype == FLOAT8 else dtype
    value_dim = value_dim or head_dim
    padded_dim = padded_head_dim(max(head_dim, value_dim))
    # Hopper's kernels have one head dim; no block size of theirs is 1.
    known_block_size = block_size if value_dim == head_dim else 1
    options = ScoreOptions(1.0, window, right=right)
    positions = metadata.positions if right == 0 else torch.empty_like(metadata.positions)
    if deterministic:
        shape = fat or shapes.deterministic_shape(group, padded_dim, product_dtype)
        work = _invariant_work(shape, metadata, group, num_tokens, _Visibility(options, positions))
        return StepMap(None, work, window, None, right, positions)
    forest = metadata.forest if window is None else None
    thin = thin or decode_tile(
        metadata.seq_lens.device,
        group,
        max(head_dim, value_dim),
        cache_dtype,
        known_block_size,
        num_sequences=metadata.seq_lens.shape[0],
        shares=forest is not None,
    )
    fat = fat or fat_shape(group, padded_dim, product_dtype)
    max_thin_tokens = thin.rows // group
    most = whole_unit_programs(metadata.seq_lens.device, head_dim, cache_dtype, known_block_size, fat)
    has_fat = metadata.max_query_len > max_thin_tokens
    heads = (num_heads, num_kv_heads, head_dim)
    if forest is not None:
        forest.check_step(heads, num_tokens, metadata.seq_lens.shape[0], max(thin.keys, fat.keys))
    see = _Visibility(options, positions, None if forest is None else forest.leaf_begin)
    sizes = (num_heads, num_kv_heads, value_dim)
    if num_splits > 0:
        tile = fat if has_fat else shapes.thin_shape(group, padded_dim, cache_dtype)
        work = _fat_work(tile, metadata, sizes, num_tokens, 0, most, see, num_splits)
        return StepMap(None, work, window, forest, right, positions, covers_all=False)
    return StepMap(
        thin=_thin_work(thin, metadata, sizes, see),
        fat=_fat_work(fat, metadata, sizes, num_tokens, max_thin_tokens, most, see) if has_fat else None,
        window=window,
        forest=forest,
        right=right,
        positions=positions,
    )


def _thin_work(
    shape: TileShape, metadata: AttentionMetadata, heads: tuple[int, int, int], see: _Visibility
) -> ThinWork:
    num_heads, num_kv_heads, value_dim = heads
    num_units, device = metadata.seq_lens.shape[0], metadata.seq_lens.device
    group = num_heads // num_kv_heads
    units, _ = _list_units(metadata, num_units, shape.rows // group, 0, shape.rows // group, see)
    num_programs = num_multiprocessors(device) * shape.programs_per_multiprocessor
    schedule = torch.empty(2 + num_programs, dtype=torch.int32, device=device)
    launch(
        schedule_kernel,
        (num_programs,),
        *(units, schedule, num_units, num_kv_heads, shape.keys, power_of_two(num_units)),
        # Alone, a sequence needs all programs to be read fast.
        MOST_PIECES if num_units > 1 else num_programs,
    )
    arrivals = torch.zeros(num_units, num_kv_heads, dtype=torch.int32, device=device)
    return ThinWork.allocate(shape, units, schedule, arrivals, value_dim)


def _fat_work(
    shape: TileShape,
    metadata: AttentionMetadata,
    heads: tuple[int, int, int],
    num_tokens: int,
    max_thin_tokens: int,
    most_programs: int,
    see: _Visibility,
    num_splits: int = 0,
) -> FatWork:
    """most_programs: see choice.whole_unit_programs."""
    num_heads, num_kv_heads, value_dim = heads
    tile_tokens = shape.rows * num_kv_heads // num_heads
    # A captured step has room for many sequences, but not for as many with more tokens than thin ones have.
    most_sequences = min(metadata.seq_lens.shape[0], num_tokens // (max_thin_tokens + 1))
    num_units = num_tokens // tile_tokens + most_sequences
    units, count = _list_units(metadata, num_units, tile_tokens, max_thin_tokens, metadata.max_query_len, see)
    # Counted by tokens: a captured step has room for many sequences, most of them empty.
    num_items = (num_tokens // tile_tokens + 1) * num_kv_heads
    num_parts = count_parts(shape, most_programs, num_items, metadata.max_seq_len, num_splits)
    return FatWork.allocate(shape, units, count, num_parts, (num_tokens, num_heads, value_dim))


def count_parts(
    shape: TileShape, most_programs: int, num_items: int, max_seq_len: int, num_splits: int = 0
) -> int:
    """Return how many programs share the keys of each of num_items (unit, kv head)s.

    Args:
        most_programs: see choice.whole_unit_programs.
        others: see plan_step.
    """
    if num_splits > 0:
        # More parts than tiles would be empty.
        return min(num_splits, max(1, -(-max_seq_len // shape.keys)), _MOST_PARTS)
    most_parts = min(most_programs // num_items, -(-max_seq_len // _MIN_SPLIT_KEYS))
    # A power of two, because each value is compiled separately.
    return 1 << max(0, most_parts.bit_length() - 1)


def _invariant_work(
    shape: TileShape, metadata: AttentionMetadata, group: int, num_tokens: int, see: _Visibility
) -> FatWork:
    """Use one tiling for all sequences; each program folds all keys of its unit, first to last.

    Then the other rows of a tile only change which keys are masked, and a masked key changes no bit. No tile
    is marked as fully visible, so that all keys take the masked loop: the other loop could round differently.
    """
    tile_tokens = shape.rows // group
    num_units = num_tokens // tile_tokens + metadata.seq_lens.shape[0]
    units, count = _list_units(metadata, num_units, tile_tokens, 0, metadata.max_query_len, see)
    units[:, 5:7].zero_()
    nothing = torch.empty(0, dtype=torch.float32, device=units.device)
    return FatWork(shape, units, count, 1, nothing, nothing, row_invariant=True)


def _list_units(
    metadata: AttentionMetadata,
    num_units: int,
    tile_tokens: int,
    above_tokens: int,
    max_tokens: int,
    see: _Visibility,
) -> tuple[Tensor, Tensor]:
    """List the units of sequences with above_tokens < query length <= max_tokens.

    Returns:
        ([num_units, 8] records, [1] how many are used), int32.
    """
    num_sequences, options, device = metadata.seq_lens.shape[0], see.options, metadata.seq_lens.device
    shifts = (see.positions, options.shift) if options.right != 0 else (None, None)
    units = torch.empty(num_units, RECORD.value, dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    launch(
        list_units_kernel,
        (num_sequences,),
        *(units, count, metadata.cu_seqlens_q, metadata.seq_lens, metadata.positions, see.leaf_begin),
        *(metadata.kv_begin, *shifts),
        *(num_sequences, num_units, above_tokens, max_tokens, options.shifted_window or 0),
        *(tile_tokens, power_of_two(tile_tokens), power_of_two(num_sequences)),
    )
    return units, count
