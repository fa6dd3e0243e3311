"""Experts on a GPU with Triton whose weights stay packed in groups of 4 or 8 bits."""

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from octavo.layers.moe.packed_weight import PackedExpertWeight
from octavo.layers.moe.router import Choice
from octavo.layers.moe.tiling import choose_packed_tiling, row_slots


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Experts by one product for any number of tokens; see layers.moe.triton.packed.

    Attributes:
        gate_up: [E, 2 n, hidden] = [gate | up].
        down: [E, hidden, n].
        activation: name of the gated activation.
    """

    gate_up: PackedExpertWeight
    down: PackedExpertWeight
    activation: str

    @property
    def form(self) -> Hashable:
        """What layers have in common if they launch the same kernels."""
        return self.gate_up.form, self.down.form

    def __call__(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """See Experts; x is float16 or bfloat16."""
        from octavo.layers.moe.triton.combine import combine_rows
        from octavo.layers.moe.triton.grouped import SortedPairs
        from octavo.layers.moe.triton.packed import packed_down_rows, packed_gate_up_rows
        from octavo.layers.moe.triton.sort import sort_pairs

        num_tokens, num_chosen = choice.experts.shape
        num_experts = self.down.words.shape[0]
        per_expert = num_tokens * num_chosen / num_experts
        tiling = choose_packed_tiling(per_expert)
        pairs, starts = sort_pairs(choice.experts, num_experts)
        by_expert = SortedPairs(pairs, starts, num_chosen, row_slots(num_tokens, per_expert, tiling.rows))
        inner = packed_gate_up_rows(x, self.gate_up, by_expert, self.activation, tiling)
        rows = packed_down_rows(inner, self.down, by_expert, tiling)
        return combine_rows(rows, choice.weights, residual)
