"""Makes a step's task map on the device: which queries read which keys, and how programs divide the work.

A unit is a tile of one sequence's query tokens and the keys they see. Units with few rows are decode units,
the others are prefill units. Each class has its own kernel: a single kernel would need the registers of the
larger. Nothing here waits for the device, so a CUDA graph can contain the launches that make a map.
kernel_call.py says what a map holds.

    record   0 table row    1 token begin   2 tokens       3 kv begin
             4 kv end       5 full begin    6 full end     7 end of its work (decode units)

Some row of the unit sees the keys kv begin : kv end; every row sees the keys full begin : full end.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.metadata import AttentionMetadata
from octavo.attention.score_options import ScoreOptions
from octavo.attention.tilings.portable import TileShape
from octavo.attention.tilings.step_tiles import Layers
from octavo.attention.triton.kernel_call import RECORD, DecodeWork, PrefillWork, StepMap
from octavo.attention.triton.window_nodes import see_nodes
from octavo.kernels.device import num_multiprocessors, power_of_two
from octavo.kernels.launch import launch

# Unused records that a program marks at a time.
CLEARED = tl.constexpr(128)
# One warp merges the pieces of a decode unit, at more than a microsecond each.
MOST_PIECES = 16


@dataclass(frozen=True, slots=True)
class _Visibility:
    """Limits of the keys that a unit sees.

    Attributes:
        options: of the layers; only window and right are read.
        positions: [T] int32, to be written where they are shifted.
        leaf_begin: [S] int32 tokens that nodes cover, or None.
        leaves_begin_at: see PrefillWork.
    """

    options: ScoreOptions
    positions: Tensor
    leaf_begin: Tensor | None = None
    leaves_begin_at: int = 0


def make_step_map(
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
    decode: TileShape | None = None,
    prefill: TileShape | None = None,
    deterministic: bool = False,
    right: int | None = 0,
    num_splits: int = 0,
    value_dim: int | None = None,
) -> StepMap:
    """Make a step's task map on the device, without waiting for it.

    Args:
        metadata: the step; layers with the window of its forest use that.
        num_tokens: T, rows of q.
        num_heads: H.
        num_kv_heads: KH.
        head_dim: D.
        dtype: of queries.
        cache_dtype: None: that of the queries.
        block_size: tokens in a block of the cache; 1: unknown.
        window: of the layers that will use the map.
        decode, prefill: tilings; None: the fastest measured.
        deterministic: no bit of a token's result may depend on the other tokens of the step. Then all units
            are prefill units, no keys are split or shared, and tokens of q that belong to no sequence get no
            result.
        right: of the layers, see ScoreOptions.
        num_splits: parts into which a query's keys are split; 0: the fastest.
        value_dim: Dv; None: D.

    Returns:
        The map. Calls that use it must run one after another, because they share its buffers.

    Raises:
        InvalidArgumentError: the forest is for other heads or fewer tokens.
    """
    dims = (head_dim, value_dim or head_dim)
    kinds = (dtype, cache_dtype or dtype, block_size, metadata.seq_lens.device)
    layers = Layers(num_heads, num_kv_heads, *dims, *kinds)
    positions = metadata.positions if right == 0 else torch.empty_like(metadata.positions)
    see = _Visibility(ScoreOptions(1.0, window, right=right), positions)
    if deterministic:
        work = _invariant_work(
            prefill or layers.deterministic_tile(), metadata, layers.group, num_tokens, see
        )
        return StepMap(None, work, window, None, right, positions)
    forest = metadata.forest
    if forest is not None and forest.unsupported_reason(window) is not None:
        forest = None
    decode = decode or layers.decode_tile(metadata.seq_lens.shape[0], shares=forest is not None)
    prefill = prefill or _prefill_tile(layers, metadata, num_tokens, num_splits)
    if forest is not None:
        num_sequences, tile_keys = metadata.seq_lens.shape[0], max(decode.keys, prefill.keys)
        forest.check_step((num_heads, num_kv_heads, head_dim), num_tokens, num_sequences, tile_keys)
        see = replace(see, leaf_begin=forest.leaf_begin, leaves_begin_at=forest.align_tokens)
        if window is not None:
            # Launched first: what follows waits for it, so its results are there when node kernels start.
            see_nodes(forest, metadata.positions, window)
    max_decode_tokens = decode.rows // layers.group
    has_prefill = metadata.max_query_len > max_decode_tokens
    if num_splits > 0:
        tile = prefill if has_prefill else layers.split_tile()
        work = _prefill_work(tile, metadata, layers, num_tokens, 0, see, num_splits)
        return StepMap(None, work, window, forest, right, positions, covers_all=False)
    decode_work, prefill_work = _decode_work(decode, metadata, layers, see), None
    if has_prefill:
        prefill_work = _prefill_work(prefill, metadata, layers, num_tokens, max_decode_tokens, see)
    return StepMap(decode_work, prefill_work, window, forest, right, positions)


def _prefill_tile(layers: Layers, metadata: AttentionMetadata, num_tokens: int, num_splits: int) -> TileShape:
    """Return the tiling for many query tokens."""
    portable = layers.portable_tile()
    if _num_parts(portable, layers, metadata, num_tokens, num_splits) > 1:
        return portable
    return layers.whole_tile(num_tokens)


def _num_parts(
    tile: TileShape, layers: Layers, metadata: AttentionMetadata, num_tokens: int, num_splits: int
) -> int:
    # Tokens are counted, because a captured step has room for many sequences, most of which are empty.
    num_units = num_tokens // (tile.rows // layers.group) + 1
    return layers.num_parts(tile, num_units, metadata.max_seq_len, num_splits)


def _decode_work(
    shape: TileShape, metadata: AttentionMetadata, layers: Layers, see: _Visibility
) -> DecodeWork:
    num_units, device = metadata.seq_lens.shape[0], metadata.seq_lens.device
    tile_tokens = shape.rows // layers.group
    units, _ = _list_units(metadata, num_units, tile_tokens, 0, tile_tokens, see)
    num_programs = num_multiprocessors(device) * shape.programs_per_multiprocessor
    schedule = torch.empty(2 + num_programs, dtype=torch.int32, device=device)
    launch(
        schedule_kernel,
        (num_programs,),
        units=units, schedule=schedule, num_units=num_units, num_kv_heads=layers.num_kv_heads,
        KEYS=shape.keys, PADDED_UNITS=power_of_two(num_units),
        # Only all programs together read a single sequence fast.
        MOST_PIECES=MOST_PIECES if num_units > 1 else num_programs,
    )  # fmt: skip
    # The counters are cleared last, so that units and schedule are written when this launch starts: decode
    # kernels read both before they wait, where metadata.keys_are_old. (A tape makes tensors first, but the
    # operators that it repeats do wait.)
    arrivals = torch.zeros(num_units, layers.num_kv_heads, dtype=torch.int32, device=device)
    return DecodeWork.allocate(shape, units, schedule, arrivals, layers.value_dim)


def _prefill_work(
    shape: TileShape,
    metadata: AttentionMetadata,
    layers: Layers,
    num_tokens: int,
    max_decode_tokens: int,
    see: _Visibility,
    num_splits: int = 0,
) -> PrefillWork:
    """Cut queries into units and their keys into parts."""
    tile_tokens = shape.rows // layers.group
    # A captured step has room for many sequences, but its tokens bound how many have over max_decode_tokens.
    most_sequences = min(metadata.seq_lens.shape[0], num_tokens // (max_decode_tokens + 1))
    num_units = num_tokens // tile_tokens + most_sequences
    units, count = _list_units(
        metadata, num_units, tile_tokens, max_decode_tokens, metadata.max_query_len, see
    )
    num_parts = _num_parts(shape, layers, metadata, num_tokens, num_splits)
    results = (num_tokens, layers.num_heads, layers.value_dim)
    return PrefillWork.allocate(shape, units, count, num_parts, results, see.leaves_begin_at)


def _invariant_work(
    shape: TileShape, metadata: AttentionMetadata, group: int, num_tokens: int, see: _Visibility
) -> PrefillWork:
    """Make a deterministic step's work: one tiling, and each program folds all keys of its unit in order.

    Then the other rows of a tile only change which keys are masked, and a masked key changes no bit. No tile
    is marked as fully visible, so that all keys take the masked loop: the other loop could round differently.
    """
    tile_tokens = shape.rows // group
    num_units = num_tokens // tile_tokens + metadata.seq_lens.shape[0]
    units, count = _list_units(metadata, num_units, tile_tokens, 0, metadata.max_query_len, see)
    units[:, 5:7].zero_()
    nothing = torch.empty(0, dtype=torch.float32, device=units.device)
    return PrefillWork(shape, units, count, 1, nothing, nothing, row_invariant=True)


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
    units = torch.empty(num_units, RECORD.value, dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    launch(
        list_units_kernel,
        (num_sequences,),
        units=units, count=count, cu_seqlens_q=metadata.cu_seqlens_q, seq_lens=metadata.seq_lens,
        positions=metadata.positions, leaf_begin=see.leaf_begin, first_keys=metadata.kv_begin,
        shifted=see.positions if options.right != 0 else None,
        shift=options.shift if options.right != 0 else None, num_sequences=num_sequences, num_units=num_units,
        above_tokens=above_tokens, max_tokens=max_tokens, window=options.shifted_window or 0,
        TILE_TOKENS=tile_tokens, PADDED_TOKENS=power_of_two(tile_tokens),
        PADDED_SEQUENCES=power_of_two(num_sequences),
    )  # fmt: skip
    return units, count


@triton.jit(do_not_specialize=["num_sequences", "num_units", "above_tokens", "max_tokens", "window", "shift"])
def list_units_kernel(
    units, count, cu_seqlens_q, seq_lens, positions, leaf_begin, first_keys, shifted, shift,
    num_sequences, num_units, above_tokens, max_tokens, window,
    TILE_TOKENS: tl.constexpr, PADDED_TOKENS: tl.constexpr, PADDED_SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Program s lists the units of sequence s. By the causal mask, its last unit has the most work.

    The last sequence with units lists its last unit first, the one before it its first, and so on in turn:
    work rises and falls without jumps and is least at the end, so programs that take units in turn get equal
    shares. The first units of the list are used, `count` of them.

    first_keys: [S] int32, the first key of each sequence that its tokens see, or None.
    shifted: [T] int32, becomes the positions plus `shift`, from which units are then made; or None.
    """
    s = tl.program_id(0)
    sequence = tl.arange(0, PADDED_SEQUENCES)
    exists = sequence < num_sequences
    lens = tl.load(cu_seqlens_q + sequence + 1, exists, 0) - tl.load(cu_seqlens_q + sequence, exists, 0)
    wanted = (lens > above_tokens) & (lens <= max_tokens)
    counts = tl.where(wanted, (lens + TILE_TOKENS - 1) // TILE_TOKENS, 0)
    first = tl.sum(tl.where(sequence < s, counts, 0))
    num_mine = tl.sum(tl.where(sequence == s, counts, 0))
    num_later = tl.sum((wanted & (sequence > s)).to(tl.int32))
    begin = tl.load(cu_seqlens_q + s).to(tl.int32)
    end = tl.load(cu_seqlens_q + s + 1).to(tl.int32)
    seq_len = tl.load(seq_lens + s).to(tl.int32)
    at = tl.arange(0, PADDED_TOKENS)
    for index in range(0, num_mine):
        tile = index
        if num_later % 2 == 0:
            tile = num_mine - 1 - index
        token = begin + tile * TILE_TOKENS
        num_tokens = tl.minimum(TILE_TOKENS, end - token)
        mine = at < num_tokens
        if shifted is None:
            highest = tl.max(tl.load(positions + token + at, mine, -1))
            lowest = tl.min(tl.load(positions + token + at, mine, 0x7FFFFFFF))
        else:
            position = shift_positions(tl.load(positions + token + at, mine, 0), shift)
            tl.store(shifted + token + at, position, mine)
            highest = tl.max(tl.where(mine, position, -1))
            lowest = tl.min(tl.where(mine, position, 0x7FFFFFFF))
        # The position of a padded row may be negative.
        kv_end = tl.maximum(0, tl.minimum(seq_len, highest + 1))
        full_end = tl.maximum(0, tl.minimum(kv_end, lowest + 1))
        kv_begin, full_begin = kv_end * 0, kv_end * 0
        if window > 0:
            kv_begin = tl.minimum(kv_end, tl.maximum(0, lowest - window + 1))
            full_begin = tl.maximum(0, highest - window + 1)
        if leaf_begin is not None:
            kv_begin = tl.minimum(kv_end, tl.maximum(kv_begin, tl.load(leaf_begin + s)))
        if first_keys is not None:
            first_key = tl.maximum(0, tl.load(first_keys + s))
            kv_begin = tl.minimum(kv_end, tl.maximum(kv_begin, first_key))
            full_begin = tl.maximum(full_begin, first_key)
        record = units + (first + index) * RECORD
        tl.store(record, s)
        tl.store(record + 1, token)
        tl.store(record + 2, num_tokens)
        tl.store(record + 3, kv_begin)
        tl.store(record + 4, kv_end)
        tl.store(record + 5, full_begin)
        tl.store(record + 6, full_end)
    if s == num_sequences - 1:
        tl.store(count, first + num_mine)
        for index in range(first + num_mine, num_units, CLEARED):
            unused = index + tl.arange(0, CLEARED)
            tl.store(units + unused * RECORD + 2, 0, unused < num_units)


@triton.jit
def shift_positions(position, shift):
    """Return positions plus ScoreOptions.shift, within what kernels can count up from."""
    return tl.minimum(position.to(tl.int64) + shift, 0x7FFFFFFE).to(tl.int32)


@triton.jit
def num_key_tiles(kv_begin, kv_end, KEYS: tl.constexpr):
    """Return how many tiles overlap the keys kv_begin : kv_end."""
    return tl.where(kv_end > kv_begin, (kv_end + KEYS - 1) // KEYS - kv_begin // KEYS, 0)


@triton.jit(do_not_specialize=["num_units"])
def schedule_kernel(
    units, schedule, num_units, num_kv_heads: tl.constexpr, KEYS: tl.constexpr, PADDED_UNITS: tl.constexpr,
    MOST_PIECES: tl.constexpr,
):  # fmt: skip
    """Cut the key tiles of all (unit, kv head), in order, into equal runs; find each run's first unit.

    No (unit, kv head) is cut into more than about MOST_PIECES pieces: one program merges them all.
    """
    unit = tl.arange(0, PADDED_UNITS)
    exists = unit < num_units
    record = units + unit * RECORD
    exists = exists & (tl.load(record + 2, exists, 0) > 0)
    tiles = num_key_tiles(tl.load(record + 3, exists, 0), tl.load(record + 4, exists, 0), KEYS)
    work = tl.where(exists, tiles * num_kv_heads, 0)
    work_end = tl.cumsum(work)
    total = tl.sum(work)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    fewest_tiles = (tl.max(tl.where(exists, tiles, 0)) + MOST_PIECES - 1) // MOST_PIECES
    tiles_per_program = tl.maximum((total + num_programs - 1) // num_programs, fewest_tiles)
    done_before = (work_end <= program * tiles_per_program) & (unit < num_units)
    tl.store(schedule + 2 + program, tl.sum(done_before.to(tl.int32)))
    if program == 0:
        tl.store(schedule, tiles_per_program)
        tl.store(schedule + 1, total)
        tl.store(record + 7, work_end, unit < num_units)
