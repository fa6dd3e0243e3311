"""Lengths of a ragged batch: the one place that says which of them there can be. NumPy only."""

from typing import NamedTuple, Protocol

import numpy as np

from octavo.errors import InvalidArgumentError

_LARGEST = np.iinfo(np.int32).max


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


class Lengths(NamedTuple):
    """The lengths of S sequences in a batch that can be, as int64.

    Attributes:
        seq_lens: [S] tokens in the cache, the query tokens included; 0: an empty row of a padded batch, whose
            query tokens, if any, see nothing.
        cu_seqlens_q: [S + 1] cumulative query lengths.
        query_lens: [S] query tokens.
    """

    seq_lens: np.ndarray
    cu_seqlens_q: np.ndarray
    query_lens: np.ndarray

    def equal(self, seq_lens: np.ndarray, cu_seqlens_q: np.ndarray) -> bool:
        """True for the same numbers."""
        pairs = (self.seq_lens, seq_lens), (self.cu_seqlens_q, cu_seqlens_q)
        return all(a.shape == b.shape and (a == b).all() for a, b in pairs)


def check_lengths(seq_lens: np.ndarray, cu_seqlens_q: np.ndarray) -> Lengths:
    """Return a batch's lengths if there can be such a batch.

    Args:
        seq_lens: [S] integers, see Lengths.
        cu_seqlens_q: [S + 1] integers, cumulative query lengths: from 0 on, never falling.

    Raises:
        InvalidArgumentError: a shape or dtype does not fit, cu_seqlens_q does not begin at 0 or falls, a
            sequence is shorter than its query but not empty, or a number is beyond int32.
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
            f"cu_seqlens_q must begin at 0, got {bounds[0]}; it cumulates the query lengths of q's rows"
        )
    query_lens = bounds[1:] - bounds[:-1]
    # Whether a number is negative shows in the sign of all of them together; one look instead of two.
    if num_sequences and (query_lens | (lens - query_lens)).min() < 0:
        _check_sequences(query_lens, lens)
    return Lengths(lens, bounds, query_lens)


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


def _check_sequences(query_lens: np.ndarray, seq_lens: np.ndarray) -> None:
    s = int(query_lens.argmin())
    if query_lens[s] < 0:
        raise InvalidArgumentError(
            f"cu_seqlens_q may not fall, but does by {-query_lens[s]} at sequence {s}; "
            f"it cumulates the query lengths of q's rows"
        )
    too_short = np.flatnonzero((seq_lens < query_lens) & (seq_lens != 0))
    if too_short.size:
        s = int(too_short[0])
        raise InvalidArgumentError(
            f"seq_lens[{s}] must count the sequence's {query_lens[s]} query tokens too, or be 0 for an empty "
            f"row; got {seq_lens[s]}"
        )


def check_capacity(seq_len: int, block_size: int, block_table: _Shaped) -> None:
    """Check that a row of the block table can hold a sequence.

    Args:
        seq_len: longest sequence, in tokens.
        block_size: tokens in a block.
        block_table: [S, max_blocks] array or tensor.

    Raises:
        InvalidArgumentError: it cannot.
    """
    num_columns = block_table.shape[1]
    if seq_len > num_columns * block_size:
        raise InvalidArgumentError(
            f"a sequence of {seq_len} tokens does not fit the block table's {num_columns} columns "
            f"of {block_size} tokens; widen the table"
        )
