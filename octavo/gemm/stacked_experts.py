"""Experts on a GPU with Triton: one tensor for all of a layer's, and no GEMM waits for the host."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor

from octavo.forms.float_experts import ExpertWeight
from octavo.forms.mxfp4_experts import Mxfp4ExpertWeight
from octavo.forms.packed_experts import PackedExpertWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.expert_table import choose_product
from octavo.gemm.hopper.mxfp4.mxfp4_rows_tiling import choose_mxfp4_many_tiling
from octavo.gemm.portable.experts.expert_tiling import (
    AnyExpertWeight,
    choose_few_tiling,
    choose_grouped_tiling,
    choose_rounded_tiling,
    row_slots,
)


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Experts by the kernels that gemm.expert_table chooses.

    Attributes:
        gate_up: [E, 2 n, hidden] = [gate | up].
        down: [E, hidden, n], packed if gate_up is.
        activation: name of the gated activation.
        deterministic: no bit of a token's result depends on the rest of the batch. Not with packed weights.
        num_elsewhere: experts of other ranks; says how many rows an expert has on average.
    """

    gate_up: AnyExpertWeight
    down: AnyExpertWeight
    activation: str
    deterministic: bool = False
    num_elsewhere: int = 0

    @property
    def form(self) -> Hashable:
        """What layers have in common if they launch the same kernels."""
        return self.gate_up.form, self.down.form

    def __call__(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """See Experts; with packed weights x is float16 or bfloat16."""
        weights = self.gate_up, self.down
        product = choose_product(
            *(x, weights, choice.experts.shape[1]),
            rows_per_expert=self.rows_per_expert(choice),
            deterministic=self.deterministic,
        )
        run: Callable[[Tensor, Choice, Tensor | None], Tensor] = getattr(self, product)
        return run(x, choice, residual)

    def rows_per_expert(self, choice: Choice) -> float:
        """Return how many of all pairs an expert has on average."""
        return choice.experts.numel() / (self.down.shape[0] + self.num_elsewhere)

    def gemv(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """Stream the experts of a token, or of a few, through programs that stay."""
        gate_up, down = self.gate_up, self.down
        inner = x.new_empty(choice.experts.numel(), gate_up.shape[1] // 2)
        gemv_of(gate_up)(x, gate_up, choice, inner, activation=self.activation, adds=False)
        out = x.new_empty(len(x), down.shape[1]) if residual is None else residual
        gemv_of(down)(inner, down, choice, out, activation=None, adds=residual is not None)
        return out

    def few(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """Run every pair of a token and an expert by itself."""
        gate_up, down = few_kernels(self.gate_up), few_kernels(self.down)
        up_tiling, down_tiling = choose_few_tiling(self.gate_up), choose_few_tiling(self.down)
        inner = gate_up.pair_gate_up(x, self.gate_up, choice.experts, self.activation, up_tiling)
        return down.pair_down(inner, self.down, choice, residual, down_tiling)

    def grouped(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """Sort the pairs by expert, and run each expert's rows together."""
        from octavo.gemm.portable.experts.grouped_gemm import grouped_gemm
        from octavo.gemm.portable.experts.sort_pairs import sort_pairs

        per_expert = self.rows_per_expert(choice)
        options = {"deterministic": self.deterministic}
        up_tiling = choose_grouped_tiling(per_expert, self.gate_up, is_gated=True, **options)
        down_tiling = choose_grouped_tiling(per_expert, self.down, is_gated=False, **options)
        slots = row_slots(len(x), per_expert, up_tiling.rows)
        by_expert = sort_pairs(choice.experts, self.down.shape[0], slots)
        inner = grouped_gemm(x, self.gate_up, by_expert, self.activation, up_tiling)
        rows = grouped_gemm(inner, self.down, by_expert, None, down_tiling)
        return self._combined(rows, choice, residual)

    def rounded(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """Round rows to float8, as weights are, and run each expert's rows together."""
        from octavo.gemm.portable.experts.grouped_gemm import grouped_gemm
        from octavo.gemm.portable.experts.sort_pairs import sort_pairs
        from octavo.kernels.quantise import quantise_rows

        gate_up, down = self.gate_up, self.down
        assert isinstance(gate_up, ExpertWeight), "rows are rounded for experts in float8"
        assert isinstance(down, ExpertWeight), "rows are rounded for experts in float8"
        per_expert = self.rows_per_expert(choice)
        tiling = choose_rounded_tiling(per_expert, is_gated=True)
        by_expert = sort_pairs(choice.experts, down.shape[0], row_slots(len(x), per_expert, tiling.rows))
        rows, scales = quantise_rows(x)
        inner = grouped_gemm(rows, gate_up, by_expert, self.activation, tiling, scales, x.dtype)
        rows, scales = quantise_rows(inner)
        tiling = choose_rounded_tiling(per_expert, is_gated=False)
        by_expert = by_expert._replace(num_slots=row_slots(len(x), per_expert, tiling.rows))
        results = grouped_gemm(rows, down, by_expert, None, tiling, scales, x.dtype)
        return self._combined(results, choice, residual)

    def persistent(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """Sort rows by expert, and stream the experts in MXFP4 through programs that stay."""
        from octavo.gemm.hopper.mxfp4.mxfp4_rows import expert_gemm
        from octavo.gemm.hopper.mxfp4.sorted_rows import sort_rows
        from octavo.gemm.portable.experts.sort_pairs import sort_pairs

        gate_up, down = self.gate_up, self.down
        assert isinstance(gate_up, Mxfp4ExpertWeight), "the persistent GEMM is for experts in MXFP4"
        assert isinstance(down, Mxfp4ExpertWeight), "the persistent GEMM is for experts in MXFP4"
        tiling = choose_mxfp4_many_tiling(self.rows_per_expert(choice))
        by_expert = sort_pairs(choice.experts, down.shape[0], 1)
        sorted_x, tiles = sort_rows(x, by_expert, tiling.rows)
        inner = expert_gemm(sorted_x, gate_up, tiles, tiling, activation=self.activation)
        # What follows takes as much memory.
        del sorted_x
        results = expert_gemm(inner, down, tiles, tiling, pairs=by_expert.pairs)
        return self._combined(results, choice, residual)

    def _combined(self, rows: Tensor, choice: Choice, residual: Tensor | None) -> Tensor:
        from octavo.gemm.portable.experts.combine import combine_rows

        return combine_rows(rows, choice, residual, num_held=self.down.shape[0])


class Gemv(Protocol):
    """One of both products of the experts of T tokens, for a form of weights."""

    def __call__(
        self, x: Tensor, weight: Any, choice: Choice, out: Tensor, *, activation: str | None, adds: bool
    ) -> None:
        """Write a product to out.

        Args:
            x: contiguous, the tokens [T, K], or for down [T k, K]; its dtype is that of out.
            weight: [E, 2 n, K] = [gate | up], or of down [E, H, K]; see unsupported_reason in its tiling.
            choice: each token's k experts; of those that are E or more nothing is read.
            out: contiguous, [T k, n]; or for down [T, H], sums over a token's experts times their weights.
            activation: of gate and up, see pair_gemv.pair_gate_up; None: this is down.
            adds: whether sums are added to out, whose rows may then be any stride apart.

        Raises:
            InvalidArgumentError: unsupported_reason gives one.
        """
        ...


def gemv_of(weight: AnyExpertWeight) -> Gemv:
    """Return the GEMV for a form of weights."""
    if isinstance(weight, PackedExpertWeight):
        from octavo.gemm.hopper.packed.packed_expert_gemv import gemv
    elif isinstance(weight, Mxfp4ExpertWeight):
        from octavo.gemm.hopper.mxfp4.mxfp4_gemv import gemv
    else:
        from octavo.gemm.hopper.floats.expert_gemv import gemv
    return gemv


def few_kernels(weight: AnyExpertWeight) -> ModuleType:
    """Return the module with the kernels of 1 to 4 tokens for a form of weights."""
    from octavo.gemm.portable.experts import grouped_gemm, pair_gemv

    return pair_gemv if isinstance(weight, ExpertWeight) else grouped_gemm
