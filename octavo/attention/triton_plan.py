# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
"""The step's task map, made on the device: who attends to what, and how the work is cut.

A unit is a tile of one sequence's query tokens and the keys they see. Units with few rows (decoding) are
thin, the others fat; each class has its kernel, since one kernel for both would take the registers of the
larger. Nothing here waits for the device, so a step's map can be remade inside a CUDA graph.

    record   0 table row    1 token begin   2 tokens       3 kv begin
             4 kv end       5 full begin    6 full end     7 end of its work (thin units)

Keys kv begin : kv end are seen by some row of the unit, keys full begin : full end by every row.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.device_forest import DeviceForest
from octavo.attention.float8 import FLOAT8
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.triton_shapes import (
    TileShape,
    deterministic_shape,
    fat_shape,
    num_multiprocessors,
    padded_head_dim,
    power_of_two,
    thin_shape,
)

RECORD = tl.constexpr(8)
# Fewer keys per part of a fat unit would not pay for the part's results.
_MIN_SPLIT_KEYS = 512


@dataclass(frozen=True, slots=True)
class ThinWork:
    """Work of the decode kernel: persistent programs, each with an equal number of key tiles.

    Attributes:
        shape: how the kernel is tiled.
        units: [U, 8] int32 records.
        schedule: [2 + P] int32: tiles per program, tiles in all, then each program's first unit.
        arrivals: [U, KH] int32, 0 between calls: pieces of a (unit, kv head) that are done.
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
        num_parts: programs that share the keys of a unit.
        partial_out: [parts, T, H, D] float32, results of parts; empty with a single part.
        partial_lse: [parts, T, H] float32, in units of log 2.
        row_invariant: a row's result must not depend on the other rows of its tile.
    """

    shape: TileShape
    units: Tensor
    num_parts: int
    partial_out: Tensor
    partial_lse: Tensor
    row_invariant: bool = False


@dataclass(frozen=True, slots=True)
class StepMap:
    """One step's work for every layer with the same heads and window; see plan_step.

    Attributes:
        thin: work of sequences with few query tokens, perhaps of no sequence; None in a deterministic step.
        fat: work of the others, or None if there are none.
        window: the window it was made for.
        forest: shared nodes, whose keys are not among those of thin and fat, or None.
    """

    thin: ThinWork | None
    fat: FatWork | None
    window: int | None
    forest: DeviceForest | None


@dataclass(frozen=True, slots=True)
class _Visibility:
    """Where a unit's keys begin: a window, or the tokens [S] int32 of each sequence that nodes cover."""

    window: int | None
    leaf_begin: Tensor | None


def plan_step(
    metadata: AttentionMetadata,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    window: int | None = None,
    thin: TileShape | None = None,
    fat: TileShape | None = None,
    deterministic: bool = False,
) -> StepMap:
    """Cut a step's attention into work, on the device and without waiting for it.

    Args:
        metadata: the step; its forest is used for layers without a window, its plan is not.
        num_tokens: T, rows of q; with max_query_len it bounds the number of units.
        num_heads: H.
        num_kv_heads: KH.
        head_dim: D.
        dtype: of queries.
        cache_dtype: None: that of the queries.
        window: of the layers that will use the map.
        thin, fat: tilings; None: what measured best.
        deterministic: a query token's result must not depend, by a single bit, on the other tokens of the
            step. Then everything is fat, no sequence's keys are split or shared, and every token of q must
            belong to a sequence: others get no result.

    Returns:
        The map. Its buffers serve one kernel at a time: calls that use it must follow one another.

    Raises:
        InvalidArgumentError: the forest is for other heads or fewer tokens.
    """
    group = num_heads // num_kv_heads
    cache_dtype = cache_dtype or dtype
    product_dtype = torch.float16 if cache_dtype == FLOAT8 else dtype
    if deterministic:
        shape = fat or deterministic_shape(group, padded_head_dim(head_dim), product_dtype)
        return StepMap(None, _invariant_work(shape, metadata, group, num_tokens, window), window, None)
    is_alone = metadata.seq_lens.shape[0] == 1
    thin = thin or thin_shape(group, padded_head_dim(head_dim), cache_dtype, is_alone=is_alone)
    fat = fat or fat_shape(group, padded_head_dim(head_dim), product_dtype)
    max_thin_tokens = thin.rows // group
    has_fat = metadata.max_query_len > max_thin_tokens
    heads = (num_heads, num_kv_heads, head_dim)
    forest = metadata.forest if window is None else None
    if forest is not None:
        forest.check_step(heads, num_tokens, metadata.seq_lens.shape[0], max(thin.keys, fat.keys))
    see = _Visibility(window, None if forest is None else forest.leaf_begin)
    return StepMap(
        thin=_thin_work(thin, metadata, heads, see),
        fat=_fat_work(fat, metadata, heads, num_tokens, max_thin_tokens, see) if has_fat else None,
        window=window,
        forest=forest,
    )


def _thin_work(
    shape: TileShape, metadata: AttentionMetadata, heads: tuple[int, int, int], see: _Visibility
) -> ThinWork:
    num_heads, num_kv_heads, head_dim = heads
    num_units, device = metadata.seq_lens.shape[0], metadata.seq_lens.device
    group = num_heads // num_kv_heads
    units = _list_units(metadata, num_units, shape.rows // group, 0, shape.rows // group, see)
    num_programs = num_multiprocessors(device) * shape.programs_per_multiprocessor
    schedule = torch.empty(2 + num_programs, dtype=torch.int32, device=device)
    _schedule_kernel[(num_programs,)](
        units, schedule, num_units, num_kv_heads, shape.keys, power_of_two(num_units)
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
    see: _Visibility,
) -> FatWork:
    num_heads, num_kv_heads, head_dim = heads
    device = metadata.seq_lens.device
    tile_tokens = shape.rows * num_kv_heads // num_heads
    num_units = num_tokens // tile_tokens + metadata.seq_lens.shape[0]
    units = _list_units(metadata, num_units, tile_tokens, max_thin_tokens, metadata.max_query_len, see)
    num_slots = num_multiprocessors(device) * shape.programs_per_multiprocessor
    # A captured step has room for many sequences, most of them without tokens.
    num_busy = num_tokens // tile_tokens + 1
    most_parts = min(num_slots // (num_busy * num_kv_heads), -(-metadata.max_seq_len // _MIN_SPLIT_KEYS))
    # A power of two, since each number is compiled for.
    num_parts = 1 << max(0, most_parts.bit_length() - 1)
    partial_shape = (num_parts if num_parts > 1 else 0, num_tokens, num_heads, head_dim)
    return FatWork(
        shape=shape,
        units=units,
        num_parts=num_parts,
        partial_out=torch.empty(partial_shape, dtype=torch.float32, device=device),
        partial_lse=torch.empty(partial_shape[:3], dtype=torch.float32, device=device),
    )


def _invariant_work(
    shape: TileShape,
    metadata: AttentionMetadata,
    group: int,
    num_tokens: int,
    window: int | None,
) -> FatWork:
    """All sequences in tiles of one shape, each tile's keys folded in one chain from the first to the last.

    A tile's number and the rows beside a row then change which keys are masked, and a masked key changes no
    bit. No tile is called full, so that all keys take the masked loop: another could round differently.
    """
    tile_tokens = shape.rows // group
    num_units = num_tokens // tile_tokens + metadata.seq_lens.shape[0]
    units = _list_units(
        metadata, num_units, tile_tokens, 0, metadata.max_query_len, _Visibility(window, None)
    )
    units[:, 5:7].zero_()
    nothing = torch.empty(0, dtype=torch.float32, device=units.device)
    return FatWork(shape, units, 1, nothing, nothing, row_invariant=True)


def _list_units(
    metadata: AttentionMetadata,
    num_units: int,
    tile_tokens: int,
    above_tokens: int,
    max_tokens: int,
    see: _Visibility,
) -> Tensor:
    """List the units of sequences with above_tokens < query length <= max_tokens: [num_units, 8] int32."""
    num_sequences = metadata.seq_lens.shape[0]
    units = torch.empty(num_units, RECORD.value, dtype=torch.int32, device=metadata.seq_lens.device)
    _list_units_kernel[(num_sequences,)](
        *(units, metadata.cu_seqlens_q, metadata.seq_lens, metadata.positions, see.leaf_begin),
        *(num_sequences, num_units, above_tokens, max_tokens, see.window or 0),
        *(tile_tokens, power_of_two(tile_tokens), power_of_two(num_sequences)),
    )
    return units


@triton.jit(do_not_specialize=["num_sequences", "num_units", "above_tokens", "max_tokens", "window"])
def _list_units_kernel(
    units, cu_seqlens_q, seq_lens, positions, leaf_begin,
    num_sequences, num_units, above_tokens, max_tokens, window,
    TILE_TOKENS: tl.constexpr, PADDED_TOKENS: tl.constexpr, PADDED_SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Program s lists the units of sequence s, whose last causal masks leave the most work.

    The first sequence's heaviest unit comes first, the next one's last: work rises and falls without
    jumps, so programs that take units in turn get equal shares.
    """
    s = tl.program_id(0)
    sequence = tl.arange(0, PADDED_SEQUENCES)
    exists = sequence < num_sequences
    lens = tl.load(cu_seqlens_q + sequence + 1, exists, 0) - tl.load(cu_seqlens_q + sequence, exists, 0)
    wanted = (lens > above_tokens) & (lens <= max_tokens)
    counts = tl.where(wanted, (lens + TILE_TOKENS - 1) // TILE_TOKENS, 0)
    first = tl.sum(tl.where(sequence < s, counts, 0))
    count = tl.sum(tl.where(sequence == s, counts, 0))
    begin, end, seq_len = tl.load(cu_seqlens_q + s), tl.load(cu_seqlens_q + s + 1), tl.load(seq_lens + s)
    at = tl.arange(0, PADDED_TOKENS)
    for index in range(0, count):
        tile = index
        if s % 2 == 0:
            tile = count - 1 - index
        token = begin + tile * TILE_TOKENS
        num_tokens = tl.minimum(TILE_TOKENS, end - token)
        mine = at < num_tokens
        highest = tl.max(tl.load(positions + token + at, mine, -1))
        lowest = tl.min(tl.load(positions + token + at, mine, 0x7FFFFFFF))
        # A padded row may have a negative position.
        kv_end = tl.maximum(0, tl.minimum(seq_len, highest + 1))
        full_end = tl.maximum(0, tl.minimum(kv_end, lowest + 1))
        kv_begin, full_begin = kv_end * 0, kv_end * 0
        if window > 0:
            kv_begin = tl.minimum(kv_end, tl.maximum(0, lowest - window + 1))
            full_begin = tl.maximum(0, highest - window + 1)
        if leaf_begin is not None:
            kv_begin = tl.minimum(kv_end, tl.load(leaf_begin + s))
        record = units + (first + index) * RECORD
        tl.store(record, s)
        tl.store(record + 1, token)
        tl.store(record + 2, num_tokens)
        tl.store(record + 3, kv_begin)
        tl.store(record + 4, kv_end)
        tl.store(record + 5, full_begin)
        tl.store(record + 6, full_end)
    if s == num_sequences - 1:
        for index in range(first + count, num_units):
            tl.store(units + index * RECORD + 2, 0)


@triton.jit
def num_key_tiles(kv_begin, kv_end, KEYS: tl.constexpr):
    """Tiles that keys kv_begin : kv_end touch."""
    return tl.where(kv_end > kv_begin, (kv_end + KEYS - 1) // KEYS - kv_begin // KEYS, 0)


@triton.jit(do_not_specialize=["num_units"])
def _schedule_kernel(
    units, schedule, num_units, num_kv_heads: tl.constexpr, KEYS: tl.constexpr, PADDED_UNITS: tl.constexpr
):
    """Cut the key tiles of all (unit, kv head), in order, into equal runs; find each run's first unit."""
    unit = tl.arange(0, PADDED_UNITS)
    exists = unit < num_units
    record = units + unit * RECORD
    exists = exists & (tl.load(record + 2, exists, 0) > 0)
    tiles = num_key_tiles(tl.load(record + 3, exists, 0), tl.load(record + 4, exists, 0), KEYS)
    work = tl.where(exists, tiles * num_kv_heads, 0)
    work_end = tl.cumsum(work)
    total = tl.sum(work)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    tiles_per_program = (total + num_programs - 1) // num_programs
    done_before = (work_end <= program * tiles_per_program) & (unit < num_units)
    tl.store(schedule + 2 + program, tl.sum(done_before.to(tl.int32)))
    if program == 0:
        tl.store(schedule, tiles_per_program)
        tl.store(schedule + 1, total)
        tl.store(record + 7, work_end, unit < num_units)
