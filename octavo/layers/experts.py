"""Experts as pairs of linear layers: runs on any device, and specifies the GPU's kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from octavo.gemm.cpu.block_linear import BlockLinear
from octavo.gemm.cpu.compiled_experts import ACTIVATIONS, CompiledExperts
from octavo.gemm.expert_choice import Choice
from octavo.gemm.gated import activate_and_multiply
from octavo.gemm.linear import Linear


class Experts(Protocol):
    """The feed-forwards of one layer."""

    def __call__(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """Run each token's experts, and sum their results in the order of the choice, in float32.

        Args:
            x: [T, hidden], normed.
            choice: each token's experts.
            residual: [T, hidden], to which the sums are added in place, or None.

        Returns:
            residual, or a new [T, hidden], dtype of x.
        """
        ...


@dataclass(frozen=True, slots=True)
class ListedExperts:
    """Experts one after the other: each multiplies the rows that chose it, and experts without rows nothing.

    Pairs of other ranks' experts count nothing. If all weights are in blocks on a CPU, one call into C does
    the same.

    Attributes:
        gate_up: for each expert, to [rows, 2 n] = [gate | up].
        down: for each expert, from [rows, n].
        activation: name of the gated activation.
    """

    gate_up: Sequence[Linear]
    down: Sequence[Linear]
    activation: str
    _compiled: CompiledExperts | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Describe the experts to C, if they can run there."""
        object.__setattr__(self, "_compiled", _compile(self.gate_up, self.down, self.activation))

    def __call__(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """See Experts."""
        rows = (x,) if residual is None else (x, residual)
        if self._compiled is not None and all(each.is_contiguous() for each in (*choice, *rows)):
            return self._compiled(x, *choice, residual)
        return self.by_expert(x, choice, residual)

    def by_expert(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """Run the experts by their linear layers."""
        num_tokens, num_chosen = choice.experts.shape
        chosen = choice.experts.flatten()
        # Pair p is token p // k with its expert number p % k.
        pairs_by_expert = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=len(self.down) + 1).tolist()
        rows = x.new_empty(num_tokens * num_chosen, x.shape[1])
        *pairs_of_own, pairs_of_others = pairs_by_expert.split(counts)
        if len(pairs_of_others):
            rows[pairs_of_others] = 0
        for expert, pairs in enumerate(pairs_of_own):
            if len(pairs):
                gate_up = self.gate_up[expert](x[pairs // num_chosen])
                rows[pairs] = self.down[expert](activate_and_multiply(gate_up, self.activation))
        return combine(rows.view(num_tokens, num_chosen, x.shape[1]), choice.weights, residual)


def _compile(gate_up: Sequence[Linear], down: Sequence[Linear], activation: str) -> CompiledExperts | None:
    """Return the experts as one call into C, or None if a layer is not one product of blocks."""
    inputs, outputs = (
        [linear.compiled for linear in each if isinstance(linear, BlockLinear)] for each in (gate_up, down)
    )
    inputs = [linear for linear in inputs if linear is not None]
    outputs = [linear for linear in outputs if linear is not None]
    is_whole = len(inputs) == len(outputs) == len(down) > 0
    return CompiledExperts(inputs, outputs, activation) if is_whole and activation in ACTIVATIONS else None


def combine(rows: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return the sums of rows [T, k, hidden] times weights [T, k], one after the other; see Experts."""
    total = torch.zeros(rows.shape[0], rows.shape[2], dtype=torch.float32, device=rows.device)
    for row, weight in zip(rows.unbind(1), weights.unbind(1), strict=True):
        total += row.float() * weight[:, None]
    if residual is None:
        return total.to(rows.dtype)
    return residual.copy_(total + residual)
