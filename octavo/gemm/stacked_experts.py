"""Experts on a GPU with Triton: one tensor for all of a layer's, and no GEMM waits for the host."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from octavo.forms.base import ExpertsWeight
from octavo.gemm.expert_choice import Choice
from octavo.gemm.portable.experts.expert_tiling import row_slots
from octavo.gemm.product import Product, available, find_pair, pair
from octavo.gemm.table import EXPERTS

_Both = tuple[Product, Product]


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Experts by the products that gemm.table has for their forms.

    Attributes:
        gate_up: [E, 2 n, hidden] = [gate | up].
        down: [E, hidden, n], packed if gate_up is.
        activation: name of the gated activation.
        deterministic: no bit of a token's result depends on the rest of the batch. Not with packed weights.
        num_elsewhere: experts of other ranks; says how many rows an expert has on average.
        rows: name of a product -> the table's rows, of gate and up, and of down.
    """

    gate_up: ExpertsWeight
    down: ExpertsWeight
    activation: str
    deterministic: bool = False
    num_elsewhere: int = 0
    rows: Mapping[str, _Both] = field(init=False, repr=False, compare=False)
    _products: tuple[_Both, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Look up the rows of the table: of gate and up, and of down."""
        weights = self.gate_up, self.down
        rows = [EXPERTS[weight.kind] for weight in weights]
        here = map(available, rows, weights)
        object.__setattr__(self, "_products", pair(*here, deterministic=self.deterministic))
        object.__setattr__(self, "rows", {both[0].name: both for both in pair(*rows)})

    @property
    def form(self) -> Hashable:
        """What layers have in common if they launch the same kernels."""
        return self.gate_up.form, self.down.form

    def __call__(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """See Experts; with packed weights x is float16 or bfloat16."""
        run: Callable[[Tensor, Choice, Tensor | None], Tensor] = getattr(self, self.product(x, choice))
        return run(x, choice, residual)

    def product(self, x: Tensor, choice: Choice) -> str:
        """Return the name of the product of a step's tokens; called per layer and step."""
        product, _ = find_pair(
            self._products,
            x,
            (self.gate_up, self.down),
            num_chosen=choice.experts.shape[1],
            rows_per_expert=self.rows_per_expert(choice),
        )
        return product.name

    def rows_per_expert(self, choice: Choice) -> float:
        """Return how many of all pairs an expert has on average."""
        return choice.experts.numel() / (self.down.shape[0] + self.num_elsewhere)

    def gemv(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """Stream the experts of a token, or of a few, through persistent programs.

        Both products are module.gemv(x, weight, choice, out, activation=, adds=), which writes to out:

            x           contiguous: the tokens [T, K], or for down [T k, K]; its dtype is that of out
            weight      [E, 2 n, K] = [gate | up], or of down [E, H, K]
            choice      each token's k experts; nothing is read of those that are E or more
            out         contiguous [T k, n]; for down [T, H], sums over a token's experts times their weights
            activation  of gate and up, see `pair_gate_up`; None for down
            adds        whether sums are added to out, whose rows may then be any stride apart
        """
        gate_up, down, products = self.gate_up, self.down, self.rows["gemv"]
        inner = x.new_empty(choice.experts.numel(), gate_up.shape[1] // 2)
        products[0].part("gemv")(x, gate_up, choice, inner, activation=self.activation, adds=False)
        out = x.new_empty(len(x), down.shape[1]) if residual is None else residual
        products[1].part("gemv")(inner, down, choice, out, activation=None, adds=residual is not None)
        return out

    def few(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """Run every pair of a token and an expert by itself."""
        up, down = self.rows["few"]
        assert up.tiling is not None, "a row of `few` without a tiling"
        assert down.tiling is not None, "a row of `few` without a tiling"
        up_tiling, down_tiling = up.tiling(self.gate_up), down.tiling(self.down)
        inner = up.part("pair_gate_up")(x, self.gate_up, choice.experts, self.activation, up_tiling)
        return down.part("pair_down")(inner, self.down, choice, residual, down_tiling)

    def grouped(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """Sort the pairs by expert, and run each expert's rows together."""
        from octavo.gemm.portable.experts.sort_pairs import sort_pairs

        per_expert, (up, down) = self.rows_per_expert(choice), self.rows["grouped"]
        assert up.tiling is not None, "a row of `grouped` without a tiling"
        assert down.tiling is not None, "a row of `grouped` without a tiling"
        options = {"deterministic": self.deterministic}
        up_tiling = up.tiling(self.gate_up, per_expert, is_gated=True, **options)
        down_tiling = down.tiling(self.down, per_expert, is_gated=False, **options)
        slots = row_slots(len(x), per_expert, up_tiling.rows)
        by_expert = sort_pairs(choice.experts, self.down.shape[0], slots)
        inner = up.part("grouped_gemm")(x, self.gate_up, by_expert, self.activation, up_tiling)
        rows = down.part("grouped_gemm")(inner, self.down, by_expert, None, down_tiling)
        return self._combined(rows, choice, residual)

    def rounded(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """Round rows to float8, as weights are, and run each expert's rows together."""
        from octavo.gemm.portable.experts.sort_pairs import sort_pairs
        from octavo.kernels.rms_norm import quantise_rows

        (product, _), per_expert = self.rows["rounded"], self.rows_per_expert(choice)
        assert product.tiling is not None, "a row of `rounded` without a tiling"
        grouped_gemm = product.part("grouped_gemm")
        tiling = product.tiling(self.gate_up, per_expert, is_gated=True)
        slots = row_slots(len(x), per_expert, tiling.rows)
        by_expert = sort_pairs(choice.experts, self.down.shape[0], slots)
        rows, scales = quantise_rows(x)
        inner = grouped_gemm(rows, self.gate_up, by_expert, self.activation, tiling, scales, x.dtype)
        rows, scales = quantise_rows(inner)
        tiling = product.tiling(self.down, per_expert, is_gated=False)
        by_expert = by_expert._replace(num_slots=row_slots(len(x), per_expert, tiling.rows))
        results = grouped_gemm(rows, self.down, by_expert, None, tiling, scales, x.dtype)
        return self._combined(results, choice, residual)

    def persistent(self, x: Tensor, choice: Choice, residual: Tensor | None = None) -> Tensor:
        """Sort rows by expert, and stream the experts through persistent programs."""
        from octavo.gemm.hopper.mxfp4.sorted_rows import sort_rows
        from octavo.gemm.portable.experts.sort_pairs import sort_pairs

        product, _ = self.rows["persistent"]
        assert product.tiling is not None, "a row of `persistent` without a tiling"
        expert_gemm, tiling = product.part("expert_gemm"), product.tiling(self.rows_per_expert(choice))
        by_expert = sort_pairs(choice.experts, self.down.shape[0], 1)
        sorted_x, tiles = sort_rows(x, by_expert, tiling.rows)
        inner = expert_gemm(sorted_x, self.gate_up, tiles, tiling, activation=self.activation)
        # The results take as much memory.
        del sorted_x
        results = expert_gemm(inner, self.down, tiles, tiling, pairs=by_expert.pairs)
        return self._combined(results, choice, residual)

    def _combined(self, rows: Tensor, choice: Choice, residual: Tensor | None) -> Tensor:
        from octavo.gemm.portable.experts.combine import combine_rows

        return combine_rows(rows, choice, residual, num_held=self.down.shape[0])
