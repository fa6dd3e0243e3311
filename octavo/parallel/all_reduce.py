"""Chooses the all-reduce algorithm on GPUs, by the size of the tensor and the number of ranks.

    one-shot   every rank sends its values to all others, and each sums all of them: one barrier
    two-shot   every rank sums one part and sends that sum to all others: two barriers, less traffic
    nccl       large tensors, and GPUs that cannot map each other's memory

Between two GPUs, one-shot and two-shot move the same number of bytes. The limits for two ranks were measured
on two H200s with NVLink (benchmarks/gpu_tensor_parallel.py). Those for more ranks follow published figures
for such GPUs without multicast.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Algorithm = Literal["one-shot", "two-shot", "nccl"]

# Number of ranks -> largest tensor in bytes. Other numbers use the limit of the next larger one.
_ONE_SHOT_BYTES: Mapping[int, int] = MappingProxyType({2: 2**23, 4: 3 * 2**17, 8: 2**17})
_TWO_SHOT_BYTES = 2**24
# In two shots, each rank's part is a multiple of 16 values of at most 4 bytes.
_PART_MULTIPLE_BYTES = 16 * 4
MAX_RANKS = 8
"""Most ranks that share memory; more ranks use NCCL."""


def one_shot_bytes(num_ranks: int) -> int:
    """Return the size in bytes of the largest tensor summed in one shot.

    Args:
        num_ranks: from 2 to MAX_RANKS.
    """
    return _ONE_SHOT_BYTES[min(size for size in _ONE_SHOT_BYTES if size >= num_ranks)]


def two_shot_bytes(num_ranks: int) -> int:
    """Return the size in bytes of the largest tensor summed in two shots, with parts of equal size.

    Args:
        num_ranks: from 2 to MAX_RANKS.
    """
    multiple = num_ranks * _PART_MULTIPLE_BYTES
    return _TWO_SHOT_BYTES // multiple * multiple


def choose_algorithm(num_bytes: int, num_ranks: int) -> Algorithm:
    """Return the algorithm for ranks that share memory.

    Args:
        num_bytes: size of the tensor.
        num_ranks: from 2 to MAX_RANKS.
    """
    if num_bytes <= one_shot_bytes(num_ranks):
        return "one-shot"
    return "two-shot" if num_bytes <= two_shot_bytes(num_ranks) else "nccl"


def describe(num_ranks: int, *, in_order: bool = False) -> str:
    """Describe the limits for people.

    Args:
        num_ranks: from 2 to MAX_RANKS.
        in_order: larger tensors are summed in pieces instead of by NCCL.
    """
    one_shot, two_shot = one_shot_bytes(num_ranks) // 2**10, two_shot_bytes(num_ranks) // 2**10
    beyond = "in pieces" if in_order else "NCCL"
    return f"one-shot up to {one_shot:,} KiB, two-shot up to {two_shot:,} KiB, {beyond} beyond"
