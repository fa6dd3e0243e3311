"""Which keys of which sequence a program of alone.py attends: one of about equally long pieces."""

import triton
import triton.language as tl

from octavo.attention.triton.units import num_key_tiles


@triton.jit
def find_piece(number, step, window, num_sequences, SEQUENCES: tl.constexpr, SPLITS: tl.constexpr, shape):
    """Cut the key tiles of a step's sequences into at most SPLITS pieces, and return one.

    Args:
        number: of the piece, below SPLITS.
        step: positions, lengths and slots of the sequences, one token each.
        window: see options.ScoreOptions; read if the shape has one.
        num_sequences: at most SEQUENCES and SPLITS.

    Returns:
        (sequence, position, kv_begin, kv_end, tiles begin : end, first piece of the sequence, its number of
        pieces, whether sequence `number` sees no keys). If there is no such piece, the number of pieces is 0.
    """
    index = tl.arange(0, SEQUENCES)
    exists = index < num_sequences
    position = tl.load(step.positions + index, mask=exists, other=-1)
    kv_end = tl.minimum(tl.load(step.seq_lens + index, mask=exists, other=0), position + 1).to(tl.int32)
    kv_begin = kv_end * 0
    if shape.windowed:
        kv_begin = tl.minimum(kv_end, tl.maximum(0, position - window + 1))
    tiles = num_key_tiles(kv_begin, kv_end, shape.keys)
    each = tl.maximum(1, tl.cdiv(tl.sum(tiles), SPLITS))
    counts = tl.cdiv(tiles, each)
    while tl.sum(counts) > SPLITS:
        each += tl.cdiv(each, 16)
        counts = tl.cdiv(tiles, each)
    sees_nothing = tl.sum((exists & (tiles == 0) & (index == number)).to(tl.int32)) > 0
    firsts = tl.sum(tl.where(index[None, :] < index[:, None], counts[None, :], 0), 1)
    is_own = (firsts <= number) & (number < firsts + counts)
    sequence, first, count = _pick(index, is_own), _pick(firsts, is_own), _pick(counts, is_own)
    begin, num_tiles = _pick(kv_begin // shape.keys, is_own), _pick(tiles, is_own)
    tile = begin + (number - first) * each
    end = tl.minimum(tile + each, begin + num_tiles)
    kv_begin, kv_end = _pick(kv_begin, is_own), _pick(kv_end, is_own)
    return sequence, _pick(position, is_own), kv_begin, kv_end, tile, end, first, count, sees_nothing


@triton.jit
def _pick(values, is_own):
    return tl.sum(tl.where(is_own, values, 0))
