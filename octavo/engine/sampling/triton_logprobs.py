"""Log-probabilities on a GPU, each row in an order of its own; imported only where Triton runs.

A library's softmax may sum a row in another order when there are other rows beside it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.launch import launch

_CHUNK = 4096


def log_softmax(logits: Tensor) -> Tensor:
    """Return new [R, V] float32 log-probabilities; a row's bits depend on that row only.

    Args:
        logits: [R, V] bfloat16, float16 or float32; rows any stride apart, last dimension contiguous.
    """
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    if out.numel():
        launch(
            _log_softmax_kernel,
            (num_rows,),
            logits_ptr=logits,
            out_ptr=out,
            vocab_size=vocab_size,
            stride_row=logits.stride(0),
            CHUNK=_CHUNK,
            num_warps=8,
        )
    return out


# How loads are laid out over threads decides the order of sums: it may not depend on what is divisible by 16.
@triton.jit(do_not_specialize=["vocab_size", "stride_row"])
def _log_softmax_kernel(logits_ptr, out_ptr, vocab_size, stride_row, CHUNK: tl.constexpr):
    """Grid: (R,). Reads the row three times: for its largest value, for the sum, for the results."""
    row = tl.program_id(0).to(tl.int64)
    logits_at = logits_ptr + row * stride_row
    token = tl.arange(0, CHUNK)
    maxima = tl.full([CHUNK], float("-inf"), tl.float32)
    start = 0
    while start < vocab_size:
        logits = _load(logits_at, start + token, vocab_size)
        maxima = tl.maximum(maxima, logits, propagate_nan=tl.PropagateNan.ALL)
        start += CHUNK
    largest = tl.max(maxima, axis=0)
    sums = tl.zeros([CHUNK], tl.float32)
    start = 0
    while start < vocab_size:
        sums += tl.exp(_load(logits_at, start + token, vocab_size) - largest)
        start += CHUNK
    # The largest value alone gives 1, so no result is positive.
    log_sum = tl.log(tl.sum(sums, axis=0))
    start = 0
    while start < vocab_size:
        logits = _load(logits_at, start + token, vocab_size)
        out_at = out_ptr + row * vocab_size + start + token
        tl.store(out_at, logits - largest - log_sum, mask=start + token < vocab_size)
        start += CHUNK


@triton.jit
def _load(logits_at, token, vocab_size):
    """Load float32 logits; beyond the vocabulary -inf."""
    return tl.load(logits_at + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
