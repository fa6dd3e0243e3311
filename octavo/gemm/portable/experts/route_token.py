"""Norm, logits and choice of experts of 1 to 4 tokens in one kernel; imported only where Triton runs.

    program (expert, token)

      while the kernel before runs    load the weights of its expert, and of the norm
      then                            norm the token, multiply, store the logits
                                      the last program of a token to finish chooses

In a step of one token each kernel waits for the previous one; waiting three times would take longer than what
is computed here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.gemm.portable.experts.router_logits import choice_keys, place_among_held
from octavo.kernels.device import power_of_two
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous
from octavo.kernels.padded_rows import new_rows
from octavo.kernels.rms_norm import inverse_rms


def norm_and_route(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    num_chosen: int,
    *,
    renormalises: bool,
    bias: Tensor | None,
    held: range | None,
    slots: Tensor | None,
    arrivals: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of a few tokens, and the fields of their Choice.

    The previous kernel must not write weights: this one may read them while that one runs.

    Args:
        hidden: [T, K] bfloat16, float16 or float32; rows any stride apart, last dimension contiguous.
        norm_weight, eps: see norm.rms_norm.
        weight: [E, K] contiguous, dtype of hidden.
        num_chosen, renormalises, bias, held, slots: see router.route_experts.
        arrivals: [T or more] int32, 0 before and after.
    """
    num_rows, (num_experts, size) = hidden.shape[0], weight.shape
    x = new_rows(hidden, num_rows, size)
    logits = hidden.new_empty(num_rows, num_experts, dtype=torch.float32)
    experts = hidden.new_empty(num_rows, num_chosen, dtype=torch.int32)
    weights = hidden.new_empty(num_rows, num_chosen, dtype=torch.float32)
    launch(
        _route_kernel,
        (num_experts, num_rows),
        hidden_ptr=hidden,
        norm_ptr=norm_weight,
        weight_ptr=weight,
        bias_ptr=bias,
        slots_ptr=slots,
        x_ptr=x,
        logits_ptr=logits,
        experts_ptr=experts,
        weights_ptr=weights,
        arrivals_ptr=arrivals,
        stride_hidden=hidden.stride(0),
        eps=eps,
        first_held=0 if held is None else held.start,
        SIZE=size,
        DEPTH=power_of_two(size),
        NUM_EXPERTS=num_experts,
        ALL=power_of_two(num_experts),
        NUM_CHOSEN=num_chosen,
        RENORMALISES=renormalises,
        NUM_HELD=num_experts if held is None else len(held),
        num_warps=4 if size <= 4096 else 8,
        **overlap_options(hidden),
    )
    return x, experts, weights


@triton.jit(do_not_specialize=["first_held"])
def _route_kernel(
    hidden_ptr, norm_ptr, weight_ptr, bias_ptr, slots_ptr, x_ptr, logits_ptr, experts_ptr, weights_ptr,
    arrivals_ptr, stride_hidden, eps, first_held,
    SIZE: tl.constexpr, DEPTH: tl.constexpr, NUM_EXPERTS: tl.constexpr, ALL: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, RENORMALISES: tl.constexpr, NUM_HELD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (E, T)."""
    start_next(OVERLAP)
    number, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k = tl.arange(0, DEPTH)
    inside_row = k < SIZE
    weight = tl.load(weight_ptr + number * SIZE + k, mask=inside_row, other=0.0)
    norm = tl.load(norm_ptr + k, mask=inside_row, other=0.0)
    wait_for_previous(OVERLAP)

    row = tl.load(hidden_ptr + token * stride_hidden + k, mask=inside_row, other=0.0).to(tl.float32)
    x = (row * inverse_rms(row, SIZE, eps) * norm.to(tl.float32)).to(x_ptr.dtype.element_ty)
    if number == 0:
        tl.store(x_ptr + token * SIZE + k, x, mask=inside_row)
    logit = tl.sum(weight.to(tl.float32) * x.to(tl.float32), axis=0)
    tl.store(logits_ptr + token * NUM_EXPERTS + number, logit)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + token, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(0) - 1:
        # Reset for the next step, whose kernel waits until this one has ended.
        tl.store(arrivals_ptr + token, 0)
        expert = tl.arange(0, ALL)
        inside = expert < NUM_EXPERTS
        logits = tl.load(
            logits_ptr + token * NUM_EXPERTS + expert, mask=inside, other=float("-inf"), cache_modifier=".cg"
        )
        if bias_ptr is not None:
            logits += tl.load(bias_ptr + expert, mask=inside, other=0.0).to(tl.float32)
        key = choice_keys(logits, expert, inside, ALL)
        rank = tl.sum((key[:, None] > key[None, :]).to(tl.int32), axis=0)
        is_chosen = rank < NUM_CHOSEN
        likely = tl.exp(logits - tl.max(logits, axis=0))
        total = tl.sum(tl.where(is_chosen, likely, 0.0) if RENORMALISES else likely, axis=0)
        chosen = place_among_held(expert, first_held, slots_ptr, token, NUM_HELD)
        at = token * NUM_CHOSEN + rank
        tl.store(experts_ptr + at, chosen, mask=is_chosen)
        tl.store(weights_ptr + at, likely / total, mask=is_chosen)
