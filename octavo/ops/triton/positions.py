"""Positions of ragged queries, in one launch: program s writes those of sequence s."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.launch import launch

# Positions that a program writes at a time.
_CHUNK = 1024


def ragged_positions(num_tokens: int, cu_seqlens: Tensor, seq_lens: Tensor, used: Tensor | None) -> Tensor:
    """Return the position of each query token, [T] int32; arguments as in octavo.ops.call.Queries.ragged."""
    positions = torch.empty(num_tokens, dtype=torch.int32, device=seq_lens.device)
    if num_tokens and seq_lens.shape[0]:
        launch(
            _positions_kernel,
            (seq_lens.shape[0],),
            positions, cu_seqlens, seq_lens, used, num_tokens, CHUNK=_CHUNK,
        )  # fmt: skip
    return positions


@triton.jit(do_not_specialize=["num_tokens"])
def _positions_kernel(positions, cu_seqlens, seq_lens, used, num_tokens, CHUNK: tl.constexpr):
    s = tl.program_id(0)
    begin, end = tl.load(cu_seqlens + s), tl.load(cu_seqlens + s + 1)
    length = end - begin if used is None else tl.load(used + s)
    first = tl.load(seq_lens + s) - length
    # Tokens after the last sequence count as its own.
    if s == tl.num_programs(0) - 1:
        end = num_tokens
    for at in range(begin, end, CHUNK):
        token = at + tl.arange(0, CHUNK)
        inside = (token >= 0) & (token < tl.minimum(end, num_tokens))
        tl.store(positions + token, first + token - begin, inside)
