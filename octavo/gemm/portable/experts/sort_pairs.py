"""Pairs of a token and its expert, sorted by expert; imported only where Triton runs.

The host never learns how many rows an expert has: the list has room for all pairs, and says where each
expert's begin.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous

# Pairs that a program reads at a time.
_SHORT_BLOCK, _LONG_BLOCK = 1024, 4096


class SortedPairs(NamedTuple):
    """Pairs by expert: expert e has pairs[starts[e] : starts[e + 1]].

    Attributes:
        pairs: [T k] int32; pair p is token p // k with its expert p % k. Those from starts[E] on are not set.
        starts: [E + 1] int32.
        num_chosen: k.
        num_slots: programs that share an expert's tiles of rows; see expert_tiling.row_slots.
    """

    pairs: Tensor
    starts: Tensor
    num_chosen: int
    num_slots: int


def sort_pairs(experts: Tensor, num_experts: int, num_slots: int) -> SortedPairs:
    """Sort pairs by expert; pairs of one expert stay in their order.

    Args:
        experts: [T, k] int32, contiguous; pairs of E are left out.
        num_experts: E.
        num_slots: see SortedPairs.
    """
    num_pairs = experts.numel()
    pairs = experts.new_empty(num_pairs)
    starts = experts.new_empty(num_experts + 1, dtype=torch.int32)
    block = _SHORT_BLOCK if num_pairs <= _SHORT_BLOCK else _LONG_BLOCK
    launch(
        _sort_kernel,
        (num_experts,),
        experts_ptr=experts,
        pairs_ptr=pairs,
        starts_ptr=starts,
        num_pairs=num_pairs,
        num_experts=num_experts,
        BLOCK=block,
        num_warps=4 if block == _SHORT_BLOCK else 8,
        **overlap_options(experts),
    )
    return SortedPairs(pairs, starts, experts.shape[1], num_slots)


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    experts_ptr, pairs_ptr, starts_ptr, num_pairs, num_experts,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (E,). A program counts the pairs of experts before its own, then lists its own."""
    start_next(OVERLAP)
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    wait_for_previous(OVERLAP)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        found = tl.load(experts_ptr + first + index, mask=first + index < num_pairs, other=num_experts)
        before += (found < expert).to(tl.int32)
    start = tl.sum(before, axis=0)
    tl.store(starts_ptr + expert, start)
    for first in range(0, num_pairs, BLOCK):
        found = tl.load(experts_ptr + first + index, mask=first + index < num_pairs, other=num_experts)
        is_own = (found == expert).to(tl.int32)
        place = start + tl.cumsum(is_own, axis=0) - 1
        tl.store(pairs_ptr + place, first + index, mask=is_own == 1)
        start += tl.sum(is_own, axis=0)
    if expert == num_experts - 1:
        tl.store(starts_ptr + num_experts, start)
