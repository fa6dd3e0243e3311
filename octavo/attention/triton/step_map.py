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
from octavo.attention.plan.device_forest import DeviceForest
from octavo.attention.triton.shapes import TileShape, deterministic_shape, fat_shape, padded_head_dim
from octavo.attention.triton.units import RECORD, list_units_kernel, schedule_kernel
from octavo.gpu.device import num_multiprocessors, power_of_two
from octavo.gpu.launch import launch

# One warp merges the pieces of a thin unit, at more than a microsecond each.
_MOST_PIECES = 16
# Splitting a fat unit into parts with fewer keys would cost more than it saves.
_MIN_SPLIT_KEYS = 512


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


@dataclass(frozen=True, slots=True)
class StepMap:
    """One step's work for every layer with the same heads and window; see plan_step.

    Attributes:
        thin: work of sequences with few query tokens (may be none); None in a deterministic step.
        fat: work of the others, or None if there are none.
        window: of the layers that use the map.
        forest: shared nodes, whose keys are not among those of thin and fat, or None.
    """

    thin: ThinWork | None
    fat: FatWork | None
    window: int | None
    forest: DeviceForest | None


@dataclass(frozen=True, slots=True)
class _Visibility:
    """Limits of the keys that a unit sees: the layers' window, and the tokens [S] int32 that nodes cover."""

    window: int | None
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

    Returns:
        The map. Calls that use it must run one after another, because they share its buffers.

    Raises:
        InvalidArgumentError: the forest is for other heads or fewer tokens.
    """
    group = num_heads // num_kv_heads
    cache_dtype = cache_dtype or dtype
    product_dtype = torch.float16 if cache_dtype == FLOAT8 else dtype
    if deterministic:
        shape = fat or deterministic_shape(group, padded_head_dim(head_dim), product_dtype)
        return StepMap(None, _invariant_work(shape, metadata, group, num_tokens, window), window, None)
    forest = metadata.forest if window is None else None
    thin = thin or decode_tile(
        metadata.seq_lens.device,
        group,
        head_dim,
        cache_dtype,
        block_size,
        num_sequences=metadata.seq_lens.shape[0],
        shares=forest is not None,
    )
    fat = fat or fat_shape(group, padded_head_dim(head_dim), product_dtype)
    max_thin_tokens = thin.rows // group
    most = whole_unit_programs(metadata.seq_lens.device, head_dim, cache_dtype, block_size, fat)
    has_fat = metadata.max_query_len > max_thin_tokens
    heads = (num_heads, num_kv_heads, head_dim)
    if forest is not None:
        forest.check_step(heads, num_tokens, metadata.seq_lens.shape[0], max(thin.keys, fat.keys))
    see = _Visibility(window, None if forest is None else forest.leaf_begin)
    return StepMap(
        thin=_thin_work(thin, metadata, heads, see),
        fat=_fat_work(fat, metadata, heads, num_tokens, max_thin_tokens, most, see) if has_fat else None,
        window=window,
        forest=forest,
    )


def _thin_work(
    shape: TileShape, metadata: AttentionMetadata, heads: tuple[int, int, int], see: _Visibility
) -> ThinWork:
    num_heads, num_kv_heads, head_dim = heads
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
        _MOST_PIECES if num_units > 1 else num_programs,
    )
    partial_shape = (2 * num_programs, shape.rows, padded_head_dim(head_dim))
    return ThinWork(
        shape=shape,
        units=units,
        schedule=schedule,
        arrivals=torch.zeros(num_units, num_kv_heads, dtype=torch.int32, device=device),
        partial_out=torch.empty(partial_shape, dtype=torch.float32, device=device),
        partial_lse=torch.empty(partial_shape[:2], dtype=torch.float32, device=device),
    )


def _fat_work(
    shape: TileShape,
    metadata: AttentionMetadata,
    heads: tuple[int, int, int],
    num_tokens: int,
    max_thin_tokens: int,
    most_programs: int,
    see: _Visibility,
) -> FatWork:
    """most_programs: see choice.whole_unit_programs."""
    num_heads, num_kv_heads, head_dim = heads
    device = metadata.seq_lens.device
    tile_tokens = shape.rows * num_kv_heads // num_heads
    # A captured step has room for many sequences, but not for as many with more tokens than thin ones have.
    most_sequences = min(metadata.seq_lens.shape[0], num_tokens // (max_thin_tokens + 1))
    num_units = num_tokens // tile_tokens + most_sequences
    units, count = _list_units(metadata, num_units, tile_tokens, max_thin_tokens, metadata.max_query_len, see)
    # Counted by tokens: a captured step has room for many sequences, most of them empty.
    num_busy = num_tokens // tile_tokens + 1
    most_parts = min(most_programs // (num_busy * num_kv_heads), -(-metadata.max_seq_len // _MIN_SPLIT_KEYS))
    # A power of two, because each value is compiled separately.
    num_parts = 1 << max(0, most_parts.bit_length() - 1)
    partial_shape = (num_parts if num_parts > 1 else 0, num_tokens, num_heads, head_dim)
    return FatWork(
        shape=shape,
        units=units,
        count=count,
        num_parts=num_parts,
        partial_out=torch.empty(partial_shape, dtype=torch.float32, device=device),
        partial_lse=torch.empty(partial_shape[:3], dtype=torch.float32, device=device),
    )


def _invariant_work(
    shape: TileShape, metadata: AttentionMetadata, group: int, num_tokens: int, window: int | None
) -> FatWork:
    """Use one tiling for all sequences; each program folds all keys of its unit, first to last.

    Then the other rows of a tile only change which keys are masked, and a masked key changes no bit. No tile
    is marked as fully visible, so that all keys take the masked loop: the other loop could round differently.
    """
    tile_tokens = shape.rows // group
    num_units = num_tokens // tile_tokens + metadata.seq_lens.shape[0]
    see = _Visibility(window)
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
    num_sequences, device = metadata.seq_lens.shape[0], metadata.seq_lens.device
    units = torch.empty(num_units, RECORD.value, dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    launch(
        list_units_kernel,
        (num_sequences,),
        *(units, count, metadata.cu_seqlens_q, metadata.seq_lens, metadata.positions, see.leaf_begin),
        *(num_sequences, num_units, above_tokens, max_tokens, see.window or 0),
        *(tile_tokens, power_of_two(tile_tokens), power_of_two(num_sequences)),
    )
    return units, count
