"""The router as two kernels: logits, then each token's experts; imported only where Triton runs."""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.gemm.expert_choice import Scoring
from octavo.gemm.operands import check_operands
from octavo.gemm.portable.invariant import invariant_linear
from octavo.gemm.portable.invariant_tiling import InvariantTiling
from octavo.gemm.portable.skinny import skinny_linear
from octavo.gemm.portable.skinny_tiling import MAX_ROWS, Tiling
from octavo.kernels.device import power_of_two
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous

_SINGLE = Tiling(columns=2, depth=2048, num_warps=4)
# Up to so many rows small tiles make enough programs, each with some experts; more rows are read once.
_MOST_SMALL_ROWS = 256
_SMALL, _LARGE = InvariantTiling(16, 16, 512, 4, 3), InvariantTiling(64, 128, 64, 4, 4)
# Less than any key of a choice.
_LOWEST = tl.constexpr(-(2**63))


def router_logits(x: Tensor, weight: Tensor, *, deterministic: bool = False) -> Tensor:
    """Return x W^T in float32.

    Args:
        x: [T, K] bfloat16, float16 or float32; rows any stride apart, last dimension contiguous.
        weight: [E, K] contiguous, dtype of x.
        deterministic: one tiling for any T.

    Returns:
        A new [T, E] float32.

    Raises:
        InvalidArgumentError: a shape, dtype or stride does not fit.
    """
    check_operands(x, weight, None)
    num_rows, (num_experts, size) = x.shape[0], weight.shape
    if num_rows == 0:
        return x.new_empty(0, num_experts, dtype=torch.float32)
    if num_rows <= MAX_ROWS and not deterministic:
        tiling = replace(_SINGLE, depth=max(16, min(_SINGLE.depth, power_of_two(size))))
        return skinny_linear(x, weight, dtype=torch.float32, tiling=tiling)
    tiling, parts = (_SMALL, 4) if deterministic or num_rows <= _MOST_SMALL_ROWS else (_LARGE, 1)
    tiling = replace(tiling, depth=min(tiling.depth, power_of_two(max(16 * parts, size))))
    return invariant_linear(x, weight, dtype=torch.float32, tiling=tiling, parts=parts)


def route_experts(
    logits: Tensor,
    num_chosen: int,
    *,
    renormalises: bool,
    bias: Tensor | None = None,
    held: range | None = None,
    slots: Tensor | None = None,
    scoring: Scoring | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the fields of a Choice; see layers.router.route_by_logits.

    Args:
        logits: [T, E] float32, contiguous.
        num_chosen: k.
        renormalises: a token's k weights are divided by their sum.
        bias: [E] contiguous, added to the logits, or None.
        held: see Router.
        slots: see Router; contiguous.
        scoring: how experts are scored and weighed; None: by a softmax of logits.
    """
    num_rows, num_experts = logits.shape
    ranks_scores, scoring = scoring is not None, scoring or Scoring()
    num_groups, num_chosen_groups = scoring.groups or (1, 1)
    experts = logits.new_empty(num_rows, num_chosen, dtype=torch.int32)
    weights = logits.new_empty(num_rows, num_chosen)
    if num_rows:
        launch(
            _choose_kernel,
            (num_rows,),
            logits_ptr=logits,
            bias_ptr=bias,
            choice_bias_ptr=scoring.bias,
            factors_ptr=scoring.expert_factors,
            slots_ptr=slots,
            experts_ptr=experts,
            weights_ptr=weights,
            first_held=0 if held is None else held.start,
            factor=scoring.factor,
            NUM_EXPERTS=num_experts,
            EXPERTS=power_of_two(num_experts),
            NUM_CHOSEN=num_chosen,
            CHOSEN=power_of_two(num_chosen),
            RENORMALISES=renormalises,
            RANKS_SCORES=ranks_scores,
            IS_SIGMOID=scoring.is_sigmoid,
            NUM_GROUPS=num_groups,
            NUM_CHOSEN_GROUPS=num_chosen_groups,
            NUM_HELD=num_experts if held is None else len(held),
            num_warps=1,
            **overlap_options(logits),
        )
    return experts, weights


@triton.jit
def choice_keys(logits, expert, inside, EXPERTS: tl.constexpr):
    """Return an integer for each logit and its expert; the largest is chosen first. NaNs count, too."""
    # Both zeros are equal, but their bits differ.
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (rising.to(tl.int64) << 32) | (EXPERTS - 1 - expert).to(tl.int64)
    return tl.where(inside, key, _LOWEST)


@triton.jit
def _rank_of(key):
    """Return the number that a key of choice_keys was made of."""
    high = (key >> 32).to(tl.int32)
    return (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _in_best_groups(
    keys, expert, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
):  # fmt: skip
    """Return whether each expert is of the groups that have the largest sums of their two best ranks."""
    group = expert // (NUM_EXPERTS // NUM_GROUPS)
    sums = tl.full([EXPERTS], float("-inf"), tl.float32)
    for number in tl.static_range(NUM_GROUPS):
        own = tl.where(group == number, keys, _LOWEST)
        first = tl.max(own, axis=0)
        second = tl.max(tl.where(own == first, _LOWEST, own), axis=0)
        sums = tl.where(group == number, _rank_of(first) + _rank_of(second), sums)
    is_open = expert < 0
    for _ in tl.static_range(NUM_CHOSEN_GROUPS):
        best = tl.argmax(tl.where(is_open, float("-inf"), sums), axis=0) // (NUM_EXPERTS // NUM_GROUPS)
        is_open |= group == best
    return is_open


@triton.jit
def place_among_held(expert, first_held, slots_ptr, token, NUM_HELD: tl.constexpr):
    """Return chosen experts' places among those held here; NUM_HELD: another rank's, or a padded token's."""
    expert -= first_held
    is_held = (expert >= 0) & (expert < NUM_HELD)
    if slots_ptr is not None:
        is_held &= tl.load(slots_ptr + token) >= 0
    return tl.where(is_held, expert, NUM_HELD)


@triton.jit(do_not_specialize=["first_held"])
def _choose_kernel(
    logits_ptr, bias_ptr, choice_bias_ptr, factors_ptr, slots_ptr, experts_ptr, weights_ptr, first_held,
    factor,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, CHOSEN: tl.constexpr,
    RENORMALISES: tl.constexpr, RANKS_SCORES: tl.constexpr, IS_SIGMOID: tl.constexpr,
    NUM_GROUPS: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr, NUM_HELD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (T,). The largest of choice_keys is the next choice."""
    start_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    wait_for_previous(OVERLAP)
    inside = expert < NUM_EXPERTS
    logits = tl.load(logits_ptr + row * NUM_EXPERTS + expert, mask=inside, other=float("-inf"))
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + expert, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(logits, axis=0)
    if RANKS_SCORES:
        likely = tl.exp(logits - largest)
        scores = tl.sigmoid(logits) if IS_SIGMOID else likely / tl.sum(likely, axis=0)
        ranks = scores
        if choice_bias_ptr is not None:
            ranks += tl.load(choice_bias_ptr + expert, mask=inside, other=0.0)
        if NUM_GROUPS > 1:
            keys = choice_keys(ranks, expert, inside, EXPERTS)
            inside &= _in_best_groups(keys, expert, NUM_EXPERTS, EXPERTS, NUM_GROUPS, NUM_CHOSEN_GROUPS)
    else:
        ranks = logits
    key = choice_keys(ranks, expert, inside, EXPERTS)

    slot = tl.arange(0, CHOSEN)
    values = tl.full([CHOSEN], float("-inf"), tl.float32)
    chosen = tl.zeros([CHOSEN], tl.int32)
    for number in tl.static_range(NUM_CHOSEN):
        best = tl.max(key, axis=0)
        best_expert = EXPERTS - 1 - (best & 0x7FFFFFFF).to(tl.int32)
        if RANKS_SCORES:
            value = tl.sum(tl.where(expert == best_expert, scores, 0.0), axis=0)
        else:
            value = _rank_of(best)
        values = tl.where(slot == number, value, values)
        chosen = tl.where(slot == number, best_expert, chosen)
        key = tl.where(expert == best_expert, _LOWEST, key)

    if RANKS_SCORES:
        weights = tl.where(slot < NUM_CHOSEN, values, 0.0)
        # Sigmoids of a token may all be 0.
        weights = weights / (tl.sum(weights, axis=0) + 1e-20) if RENORMALISES else weights
        weights *= factor
        if factors_ptr is not None:
            weights *= tl.load(factors_ptr + chosen, mask=slot < NUM_CHOSEN, other=0.0)
    else:
        weights = tl.exp(values - largest)
        weights /= tl.sum(weights if RENORMALISES else tl.exp(logits - largest), axis=0)
    chosen = place_among_held(chosen, first_held, slots_ptr, row, NUM_HELD)
    at = row * NUM_CHOSEN + slot
    tl.store(experts_ptr + at, chosen, mask=slot < NUM_CHOSEN)
    tl.store(weights_ptr + at, weights, mask=slot < NUM_CHOSEN)
