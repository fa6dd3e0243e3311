"""Kernels that write the records of units and the schedule of their work.

    record   0 table row    1 token begin   2 tokens       3 kv begin
             4 kv end       5 full begin    6 full end     7 end of its work (decode units)

Some row of the unit sees the keys kv begin : kv end; every row sees the keys full begin : full end.
"""

import triton
import triton.language as tl

RECORD = tl.constexpr(8)
# Unused records marked at a time.
CLEARED = tl.constexpr(128)


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
            kv_begin = tl.minimum(kv_end, tl.load(leaf_begin + s))
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
