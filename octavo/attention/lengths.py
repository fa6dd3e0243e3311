"""Lengths of a ragged batch: their checks, and the ranges that plans are made of. NumPy only."""

from typing import NamedTuple, Protocol

import numpy as np

from octavo.errors import InvalidArgumentError

_LARGEST = np.iinfo(np.int32).max


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


class Lengths(NamedTuple):
    """The checked lengths of S sequences, int64.

    Attributes:
        seq_lens: [S] tokens in the cache, including the query tokens. 0 marks an empty row of a padded batch;
            its query tokens, if any, see nothing.
        cu_seqlens_q: [S + 1] cumulative query lengths.
        query_lens: [S] query tokens.
    """

    seq_lens: np.ndarray
    cu_seqlens_q: np.ndarray
    query_lens: np.ndarray

    def equal(self, seq_lens: np.ndarray, cu_seqlens_q: np.ndarray) -> bool:
        """Return whether the given lengths equal these."""
        pairs = (self.seq_lens, seq_lens), (self.cu_seqlens_q, cu_seqlens_q)
        return all(a.shape == b.shape and (a == b).all() for a, b in pairs)


def check_lengths(seq_lens: np.ndarray, cu_seqlens_q: np.ndarray, *, may_be_short: bool = False) -> Lengths:
    """Check a batch's lengths and return them.

    Args:
        seq_lens: [S] integers, see Lengths.
        cu_seqlens_q: [S + 1] integers, see Lengths.
        may_be_short: a sequence may have fewer tokens than queries; the first ones see nothing if causal.

    Raises:
        InvalidArgumentError: a shape or dtype does not fit, cu_seqlens_q does not begin at 0 or decreases, a
            sequence is shorter than its query but not empty, or a number exceeds int32.
    """
    lens, bounds = _to_int64("seq_lens", seq_lens), _to_int64("cu_seqlens_q", cu_seqlens_q)
    num_sequences = lens.shape[0]
    if bounds.shape[0] != num_sequences + 1:
        raise InvalidArgumentError(
            f"cu_seqlens_q must have {num_sequences + 1} entries, one more than seq_lens; "
            f"got {bounds.shape[0]}"
        )
    if bounds[0] != 0:
        raise InvalidArgumentError(
            f"cu_seqlens_q must begin at 0, got {bounds[0]}; it holds the cumulative query lengths"
        )
    query_lens = bounds[1:] - bounds[:-1]
    # The bitwise or is negative if either number is: one comparison instead of two.
    if num_sequences and (query_lens | (lens if may_be_short else lens - query_lens)).min() < 0:
        _check_sequences(query_lens, lens, may_be_short=may_be_short)
    return Lengths(lens, bounds, query_lens)


def check_kv_begin(kv_begin: np.ndarray, lengths: Lengths) -> np.ndarray:
    """Return the first key of each sequence, [S] int64; see AttentionMetadata.

    Raises:
        InvalidArgumentError: the shape or dtype does not fit, or a number is negative.
    """
    begin = _to_int64("kv_begin", kv_begin)
    if begin.shape != lengths.seq_lens.shape or begin.min(initial=0) < 0:
        raise InvalidArgumentError(
            f"kv_begin must be [{lengths.seq_lens.shape[0]}], one per seq_lens entry, and not negative; "
            f"got {list(begin.shape)} with minimum {begin.min(initial=0)}"
        )
    return begin


def _to_int64(name: str, values: np.ndarray) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InvalidArgumentError(
            f"{name} must be one-dimensional and of integers; got {list(array.shape)} {array.dtype}"
        )
    if array.dtype != np.int32 and array.size and not -_LARGEST - 1 <= array.min() <= array.max() <= _LARGEST:
        raise InvalidArgumentError(
            f"{name} must fit int32, got {array.min()} to {array.max()}; are the lengths corrupt?"
        )
    return array.astype(np.int64)


def _check_sequences(query_lens: np.ndarray, seq_lens: np.ndarray, *, may_be_short: bool) -> None:
    s = int(query_lens.argmin())
    if query_lens[s] < 0:
        raise InvalidArgumentError(
            f"cu_seqlens_q must not decrease, but does by {-query_lens[s]} at sequence {s}; "
            f"it holds the cumulative query lengths"
        )
    if may_be_short and seq_lens.min() < 0:
        s = int(seq_lens.argmin())
        raise InvalidArgumentError(f"seq_lens[{s}] must not be negative, got {seq_lens[s]}")
    too_short = np.flatnonzero((seq_lens < query_lens) & (seq_lens != 0))
    if too_short.size:
        s = int(too_short[0])
        raise InvalidArgumentError(
            f"seq_lens[{s}] must include the sequence's {query_lens[s]} query tokens, or be 0 for an empty "
            f"row; got {seq_lens[s]}"
        )


def check_capacity(seq_len: int, block_size: int, block_table: _Shaped) -> None:
    """Raise InvalidArgumentError if a row of a block table [S, max_blocks] cannot hold seq_len tokens."""
    num_columns = block_table.shape[1]
    if seq_len > num_columns * block_size:
        raise InvalidArgumentError(
            f"a sequence of {seq_len} tokens does not fit the block table's {num_columns} columns "
            f"of {block_size} tokens; widen the table"
        )


def cumulative(lengths: np.ndarray) -> np.ndarray:
    """Return 0, lengths[0], lengths[0] + lengths[1] and so on: [n + 1] int64."""
    sums = np.zeros(lengths.shape[0] + 1, dtype=np.int64)
    np.cumsum(lengths, out=sums[1:])
    return sums


def concatenated_ranges(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return begins[0] .. begins[0] + lengths[0] - 1, then the next range, and so on: [sum(lengths)]."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total) + np.repeat(begins - (ends - lengths), lengths)


def expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (owner, index): owner i is repeated counts[i] times, and its copies are numbered from 0."""
    owner = np.repeat(np.arange(counts.shape[0]), counts)
    return owner, np.arange(owner.shape[0]) - np.repeat(np.cumsum(counts) - counts, counts)
