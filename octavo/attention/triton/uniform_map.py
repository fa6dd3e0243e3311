"""A step's task map in one launch, where all sequences have equally many query tokens.

A call of attention outside an engine makes a map for a single layer. make_step_map takes three launches for
that, one after the other: records, cleared counters, schedule. Here the host knows the query length, and so
the number of units. Each program counts the key tiles of all units by itself, with one load of up to 1,024
lengths.

    program p     all programs: key tiles of every unit -> tiles per program -> p's first unit
                  program 0: records of decode units
                  part p of: cu_seqlens_q, positions, cleared counters, records of prefill units
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.score_options import ScoreOptions
from octavo.attention.tilings.portable import TileShape
from octavo.attention.tilings.step_tiles import Layers
from octavo.attention.triton.kernel_call import DecodeWork, PrefillWork, StepMap
from octavo.attention.triton.step_map import MOST_PIECES, RECORD, num_key_tiles, shift_positions
from octavo.kernels.device import num_multiprocessors, power_of_two
from octavo.kernels.launch import launch

# Entries that a program writes at a time.
_CHUNK = 256


def make_uniform_map(
    seq_lens: Tensor,
    kv_begin: Tensor | None,
    *,
    query_len: int,
    max_seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    block_size: int,
    options: ScoreOptions,
    num_splits: int = 0,
) -> tuple[StepMap, Tensor]:
    """Make the task map of sequences whose last query_len tokens are the queries, in one launch.

    Args:
        seq_lens: [S] int32 or int64, with S of at most MOST_UNIFORM and at least 1.
        kv_begin: [S] int32 first keys, or None.
        query_len: query tokens of each sequence, at least 1.
        max_seq_len: no sequence is longer.
        options: of the layer; only window and right are read.
        others: see make_step_map.

    Returns:
        (map, whose positions are the queries', shifted; cu_seqlens_q [S + 1] int32).
    """
    kinds = (dtype, cache_dtype, block_size, seq_lens.device)
    layers = Layers(num_heads, num_kv_heads, head_dim, value_dim, *kinds)
    num_sequences, num_tokens = seq_lens.shape[0], seq_lens.shape[0] * query_len
    shape, num_parts = _choose_tile(layers, num_sequences, query_len, max_seq_len, num_splits)
    is_decode, tile_tokens = num_parts == 0, shape.rows // layers.group
    num_tiles = -(-query_len // tile_tokens)
    num_programs = num_multiprocessors(seq_lens.device) * shape.programs_per_multiprocessor
    sizes = (
        num_sequences + 1,
        num_tokens,
        num_sequences * num_tiles * RECORD.value,
        2 + num_programs if is_decode else 0,
        num_sequences * num_kv_heads if is_decode else 0,
        1,
    )
    cu_seqlens_q, positions, units, schedule, arrivals, count = _allocate(sizes, seq_lens.device)
    launch(
        _map_kernel,
        (num_programs,),
        cu_seqlens_q=cu_seqlens_q, positions=positions, units=units, schedule=schedule, arrivals=arrivals,
        count=count, seq_lens=seq_lens, first_keys=kv_begin, num_sequences=num_sequences, query_len=query_len,
        num_tiles=num_tiles, shift=options.shift, window=options.shifted_window or 0, KV_HEADS=num_kv_heads,
        TILE_TOKENS=tile_tokens, KEYS=shape.keys, DECODE=is_decode,
        PADDED_SEQUENCES=power_of_two(num_sequences), CHUNK=_CHUNK,
        MOST_PIECES=MOST_PIECES if num_sequences > 1 else num_programs,
    )  # fmt: skip
    units = units.view(-1, RECORD.value)
    decode, prefill = None, None
    if is_decode:
        decode = DecodeWork.allocate(shape, units, schedule, arrivals.view(num_sequences, -1), value_dim)
    else:
        prefill = PrefillWork.allocate(shape, units, count, num_parts, (num_tokens, num_heads, value_dim))
    return StepMap(decode, prefill, options.window, None, options.right, positions), cu_seqlens_q


def _choose_tile(
    layers: Layers, num_sequences: int, query_len: int, max_seq_len: int, num_splits: int
) -> tuple[TileShape, int]:
    """Return the tiling, and in how many parts keys are read; 0: the decode kernel divides them itself."""
    decode = layers.decode_tile(num_sequences, shares=False)
    is_short = query_len <= decode.rows // layers.group
    if is_short and num_splits == 0:
        return decode, 0

    def num_parts(tile: TileShape) -> int:
        num_units = num_sequences * -(-query_len // (tile.rows // layers.group))
        return layers.num_parts(tile, num_units, max_seq_len, num_splits)

    tile = layers.split_tile() if is_short else layers.portable_tile()
    if not is_short and num_parts(tile) == 1:
        tile = layers.whole_tile(num_sequences * query_len)
    return tile, num_parts(tile)


def _allocate(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Allocate int32 arrays in one piece of memory, each at a multiple of 16 bytes."""
    rounded = [-(-size // 4) * 4 for size in sizes]
    parts = torch.empty(sum(rounded), dtype=torch.int32, device=device).split(rounded)
    return tuple(part[:size] for part, size in zip(parts, sizes, strict=True))


@triton.jit(do_not_specialize=["num_sequences", "query_len", "num_tiles", "shift", "window"])
def _map_kernel(
    cu_seqlens_q, positions, units, schedule, arrivals, count, seq_lens, first_keys,
    num_sequences, query_len, num_tiles, shift, window,
    KV_HEADS: tl.constexpr, TILE_TOKENS: tl.constexpr, KEYS: tl.constexpr, DECODE: tl.constexpr,
    PADDED_SEQUENCES: tl.constexpr, CHUNK: tl.constexpr, MOST_PIECES: tl.constexpr,
):  # fmt: skip
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    step = num_programs * CHUNK
    at = tl.arange(0, CHUNK)
    for begin in range(program * CHUNK, num_sequences + 1, step):
        s = begin + at
        tl.store(cu_seqlens_q + s, s * query_len, s <= num_sequences)
    for begin in range(program * CHUNK, num_sequences * query_len, step):
        token = begin + at
        s = token // query_len
        exists = s < num_sequences
        seq_len = tl.load(seq_lens + s, exists, 0).to(tl.int32)
        tl.store(positions + token, shift_positions(seq_len - query_len + token % query_len, shift), exists)
    if DECODE:
        for begin in range(program * CHUNK, num_sequences * KV_HEADS, step):
            tl.store(arrivals + begin + at, 0, begin + at < num_sequences * KV_HEADS)
        s = tl.arange(0, PADDED_SEQUENCES)
        kv_begin, kv_end = _write_records(
            units, seq_lens, first_keys, s, s, s * 0, program == 0,
            num_sequences, query_len, shift, window, TILE_TOKENS,
        )  # fmt: skip
        tiles = num_key_tiles(kv_begin, kv_end, KEYS)
        work_end = tl.cumsum(tiles * KV_HEADS)
        exists = s < num_sequences
        total = tl.max(tl.where(exists, work_end, 0))
        fewest_tiles = (tl.max(tiles) + MOST_PIECES - 1) // MOST_PIECES
        tiles_per_program = tl.maximum((total + num_programs - 1) // num_programs, fewest_tiles)
        done_before = (work_end <= program * tiles_per_program) & exists
        tl.store(schedule + 2 + program, tl.sum(done_before.to(tl.int32)))
        if program == 0:
            tl.store(schedule, tiles_per_program)
            tl.store(schedule + 1, total)
            tl.store(units + s * RECORD + 7, work_end, exists)
    else:
        if program == 0:
            tl.store(count, num_sequences * num_tiles)
        for begin in range(program * CHUNK, num_sequences * num_tiles, step):
            # As in list_units_kernel, work rises and falls without jumps.
            unit = begin + at
            s = unit // num_tiles
            tile = unit % num_tiles
            tile = tl.where((num_sequences - 1 - s) % 2 == 0, num_tiles - 1 - tile, tile)
            _write_records(
                units, seq_lens, first_keys, unit, s, tile, True,
                num_sequences, query_len, shift, window, TILE_TOKENS,
            )  # fmt: skip


@triton.jit
def _write_records(
    units, seq_lens, first_keys, unit, s, tile, writes,
    num_sequences, query_len, shift, window, TILE_TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the records of units if `writes`; each is a tile of query tokens of sequence s.

    Returns:
        (kv begin, kv end) of the units, both 0 for those that do not exist.
    """
    exists = s < num_sequences
    seq_len = tl.load(seq_lens + s, exists, 0).to(tl.int32)
    first = tile * TILE_TOKENS
    num_tokens = tl.minimum(TILE_TOKENS, query_len - first)
    lowest = shift_positions(seq_len - query_len + first, shift)
    highest = shift_positions(seq_len - query_len + first + num_tokens - 1, shift)
    # Queries before the first key have negative positions.
    kv_end = tl.where(exists, tl.maximum(0, tl.minimum(seq_len, highest + 1)), 0)
    full_end = tl.maximum(0, tl.minimum(kv_end, lowest + 1))
    kv_begin, full_begin = kv_end * 0, kv_end * 0
    if window > 0:
        kv_begin = tl.minimum(kv_end, tl.maximum(0, lowest - window + 1))
        full_begin = tl.maximum(0, highest - window + 1)
    if first_keys is not None:
        first_key = tl.maximum(0, tl.load(first_keys + s, exists, 0))
        kv_begin = tl.minimum(kv_end, tl.maximum(kv_begin, first_key))
        full_begin = tl.maximum(full_begin, first_key)
    record = units + unit * RECORD
    mask = exists & writes
    tl.store(record, s, mask)
    tl.store(record + 1, s * query_len + first, mask)
    tl.store(record + 2, num_tokens, mask)
    tl.store(record + 3, kv_begin, mask)
    tl.store(record + 4, kv_end, mask)
    tl.store(record + 5, full_begin, mask)
    tl.store(record + 6, full_end, mask)
    return kv_begin, kv_end
