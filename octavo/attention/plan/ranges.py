"""Ragged ranges in NumPy, from which plans are made."""

import numpy as np


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
