"""Rotations of a step's positions, for all layers, in one launch; imported only where Triton runs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.device import power_of_two
from octavo.kernels.launch import launch

_TOKENS = 16


def rotation_table(positions: Tensor, inverse_frequencies: Tensor, lengths: Tensor) -> Tensor:
    """Return lengths times cosines and sines of every position's angles, computed in float32.

    Args:
        positions: [T] int32 or int64, contiguous.
        inverse_frequencies: [D / 2] float32, radians per position, contiguous.
        lengths: [D / 2] float32, factors of rotations, contiguous; see Rotary.

    Returns:
        A new [2, T, D / 2] float32: cosines, sines.
    """
    num_tokens, num_pairs = positions.shape[0], inverse_frequencies.shape[0]
    table = torch.empty(2, num_tokens, num_pairs, dtype=torch.float32, device=positions.device)
    if num_tokens:
        launch(
            _rotation_table_kernel,
            (-(-num_tokens // _TOKENS),),
            *(positions, inverse_frequencies, lengths, table, num_tokens, num_pairs),
            TOKENS=_TOKENS,
            PAIRS=power_of_two(num_pairs),
        )
    return table


@triton.jit(do_not_specialize=["num_tokens"])
def _rotation_table_kernel(
    positions_ptr, inverse_frequencies_ptr, lengths_ptr, table_ptr, num_tokens, num_pairs: tl.constexpr,
    TOKENS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(T / TOKENS),)."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    pair = tl.arange(0, PAIRS)
    position = tl.load(positions_ptr + token, mask=token < num_tokens, other=0)
    frequency = tl.load(inverse_frequencies_ptr + pair, mask=pair < num_pairs, other=0.0)
    length = tl.load(lengths_ptr + pair, mask=pair < num_pairs, other=0.0)[None, :]
    angle = position.to(tl.float32)[:, None] * frequency[None, :]
    at = token.to(tl.int64)[:, None] * num_pairs + pair[None, :]
    inside = (token < num_tokens)[:, None] & (pair < num_pairs)[None, :]
    tl.store(table_ptr + at, length * tl.cos(angle), mask=inside)
    tl.store(table_ptr + num_tokens.to(tl.int64) * num_pairs + at, length * tl.sin(angle), mask=inside)
