"""The one place that chooses how ranks on GPUs sum: by the size of the tensor and the number of ranks.

    one-shot   every rank sends all of its values to all others, and each sums them: one meeting
    two-shot   every rank sums its part and sends the sum to all others: two meetings, less traffic
    nccl       large tensors, and GPUs that cannot reach each other's memory

Between two GPUs both kinds move the same bytes. The limits of two ranks were measured on two H200s with
NVLink (benchmarks/gpu_tensor_parallel.py); those of more ranks come from what others published for such GPUs
without multicast.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Way = Literal["one-shot", "two-shot", "nccl"]

# Number of ranks -> most bytes of a tensor; for other numbers, what the next larger one has.
_ONE_SHOT_BYTES: Mapping[int, int] = MappingProxyType({2: 2**23, 4: 3 * 2**17, 8: 2**17})
_TWO_SHOT_BYTES = 2**24
# In two shots every rank's part is a multiple of 16 values, which have at most 4 bytes each.
_PART_MULTIPLE_BYTES = 16 * 4
MAX_RANKS = 8
"""Ranks that share memory; more of them sum by NCCL."""


def one_shot_bytes(num_ranks: int) -> int:
    """Return the most bytes of a tensor that is summed in one shot.

    Args:
        num_ranks: from 2 to MAX_RANKS.
    """
    return _ONE_SHOT_BYTES[min(size for size in _ONE_SHOT_BYTES if size >= num_ranks)]


def two_shot_bytes(num_ranks: int) -> int:
    """Return the most bytes of a tensor that is summed in two shots: parts of all ranks have the same size.

    Args:
        num_ranks: from 2 to MAX_RANKS.
    """
    multiple = num_ranks * _PART_MULTIPLE_BYTES
    return _TWO_SHOT_BYTES // multiple * multiple


def choose_way(num_bytes: int, num_ranks: int) -> Way:
    """Return how ranks that share memory sum a tensor.

    Args:
        num_bytes: of the tensor.
        num_ranks: from 2 to MAX_RANKS.
    """
    if num_bytes <= one_shot_bytes(num_ranks):
        return "one-shot"
    return "two-shot" if num_bytes <= two_shot_bytes(num_ranks) else "nccl"


def describe(num_ranks: int, *, in_order: bool = False) -> str:
    """Say for people which sums go which way.

    Args:
        num_ranks: from 2 to MAX_RANKS.
        in_order: larger sums are cut, instead of left to NCCL.
    """
    one_shot, two_shot = one_shot_bytes(num_ranks) // 2**10, two_shot_bytes(num_ranks) // 2**10
    beyond = "in pieces" if in_order else "NCCL"
    return f"one-shot up to {one_shot:,} KiB, two-shot up to {two_shot:,} KiB, {beyond} beyond"
