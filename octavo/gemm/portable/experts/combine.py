"""The sum over a token's experts, in one order; imported only where Triton runs."""

from torch import Tensor

from octavo.gemm.expert_choice import Choice
from octavo.gemm.portable.sum_parts import sum_experts


def combine_rows(rows: Tensor, choice: Choice, residual: Tensor | None = None, *, num_held: int) -> Tensor:
    """Sum each token's rows times their weights, in float32, from the first to the last.

    Args:
        rows: [T k, H] contiguous, a token's k rows one after the other.
        choice: each token's experts and their weights, contiguous.
        residual: [T, H], dtype of rows, rows any stride apart: the sums are added to it in place; or None.
        num_held: rows of experts from this one on count as 0, whatever they hold.

    Returns:
        residual, or a new [T, H], dtype of rows.
    """
    num_tokens = len(choice.experts)
    out = rows.new_empty(num_tokens, rows.shape[1]) if residual is None else residual
    if num_tokens:
        sum_experts(rows, *choice, out, num_held=num_held, adds=residual is not None)
    return out
