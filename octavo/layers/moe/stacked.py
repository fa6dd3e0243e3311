"""Experts on a GPU with Triton: one tensor for all of a layer's, and no product waits for the host."""

from collections.abc import Hashable
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from octavo.layers.moe.choice import Product, choose_product
from octavo.layers.moe.mxfp4_weight import Mxfp4ExpertWeight
from octavo.layers.moe.router import Choice
from octavo.layers.moe.tiling import choose_few_tiling, choose_grouped_tiling, row_slots
from octavo.layers.moe.weight import ExpertWeight


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Experts by the products that layers.moe.choice chooses.

    Attributes:
        gate_up: [E, 2 n, hidden] = [gate | up].
        down: [E, hidden, n].
        activation: name of the gated activation.
        deterministic: no bit of a token's result depends on the rest of the batch.
    """

    gate_up: ExpertWeight | Mxfp4ExpertWeight
    down: ExpertWeight | Mxfp4ExpertWeight
    activation: str
    deterministic: bool = False

    @property
    def form(self) -> Hashable:
        """What layers have in common if they launch the same kernels."""
        return self.gate_up.form, self.down.form

    def __call__(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """See Experts."""
        product = choose_product(x.shape[0], deterministic=self.deterministic)
        return (self.few if product == "few" else self.grouped)(x, choice, residual)

    def few(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """Run every pair of a token and an expert by itself."""
        gate_up, down = (expert_kernels(weight, "few") for weight in (self.gate_up, self.down))
        up_tiling, down_tiling = (choose_few_tiling(weight) for weight in (self.gate_up, self.down))
        inner = gate_up.few_gate_up(x, self.gate_up, choice.experts, self.activation, up_tiling)
        return down.few_down(inner, self.down, *choice, residual, down_tiling)

    def grouped(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """Sort the pairs by expert, and run each expert's rows together."""
        from octavo.layers.moe.triton.combine import combine_rows
        from octavo.layers.moe.triton.grouped import SortedPairs
        from octavo.layers.moe.triton.sort import sort_pairs

        num_tokens, num_chosen = choice.experts.shape
        num_experts = self.down.values.shape[0]
        per_expert = num_tokens * num_chosen / num_experts
        options = {"deterministic": self.deterministic}
        up_tiling = choose_grouped_tiling(per_expert, self.gate_up, is_gated=True, **options)
        down_tiling = choose_grouped_tiling(per_expert, self.down, is_gated=False, **options)
        pairs, starts = sort_pairs(choice.experts, num_experts)
        by_expert = SortedPairs(pairs, starts, num_chosen, row_slots(num_tokens, per_expert, up_tiling.rows))
        gate_up, down = (expert_kernels(weight, "grouped") for weight in (self.gate_up, self.down))
        inner = gate_up.gate_up_rows(x, self.gate_up, by_expert, self.activation, up_tiling)
        rows = down.down_rows(inner, self.down, by_expert, down_tiling)
        return combine_rows(rows, choice.weights, residual)


def expert_kernels(weight: ExpertWeight | Mxfp4ExpertWeight, product: Product) -> ModuleType:
    """Return the module with a product's kernels for a form of weights."""
    from octavo.layers.moe.triton import few, grouped, mxfp4_few, mxfp4_grouped

    if isinstance(weight, Mxfp4ExpertWeight):
        return mxfp4_few if product == "few" else mxfp4_grouped
    return few if product == "few" else grouped
