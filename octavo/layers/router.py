"""The router: which experts a token goes to, and how much each of them counts."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear

from octavo.gemm.expert_choice import Choice, Scoring
from octavo.gemm.product import Product, available, find
from octavo.gemm.table import PRODUCTS
from octavo.kernels.device import has_triton
from octavo.layers.norm import RMSNorm

# Sigmoids of a token may all be 0.
_LEAST_SUM = 1e-20


@dataclass(frozen=True, slots=True)
class Router:
    """Softmax over all experts' logits, then the k most probable experts.

    Logits and probabilities are float32. Experts with equal logits come in the order of their indices.

    Attributes:
        weight: [E, hidden], of the dtype of x, or float32.
        num_chosen: k.
        renormalises: a token's k weights are divided by their sum.
        deterministic: no bit of a token's choice depends on the rest of the batch.
        bias: [E], added to the logits, or None.
        held: the experts of this rank, if ranks hold whole ones; None: all.
        scoring: how experts are scored and weighed; None: by a softmax of logits.
    """

    weight: Tensor
    num_chosen: int
    renormalises: bool
    deterministic: bool = False
    bias: Tensor | None = None
    held: range | None = None
    scoring: Scoring | None = None
    _products: tuple[Product, ...] = field(init=False, repr=False, compare=False)
    # How many programs of norm_and_route have finished, for each token.
    _arrivals: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Allocate what a kernel counts with, where there are kernels."""
        products = available(PRODUCTS["router"], self.weight)
        object.__setattr__(self, "_products", products)
        num_rows = max(product.norms for product in products) if has_triton(self.weight) else 0
        arrivals = torch.zeros(num_rows, dtype=torch.int32, device=self.weight.device)
        object.__setattr__(self, "_arrivals", arrivals)

    def from_stream(
        self, hidden: Tensor, norm: RMSNorm, slots: Tensor | None = None
    ) -> tuple[Tensor, Choice]:
        """Return the norm of hidden [T, hidden], and the choice of its experts; slots: see __call__."""
        if not self._fuses(hidden):
            x = norm(hidden)
            return x, self(x, slots)
        from octavo.gemm.portable.experts.route_token import norm_and_route

        x, *choice = norm_and_route(
            hidden,
            norm.weight,
            norm.eps,
            self.weight,
            self.num_chosen,
            renormalises=self.renormalises,
            bias=self.bias,
            held=self.held,
            slots=slots,
            arrivals=self._arrivals,
        )
        return x, Choice(*choice)

    def _fuses(self, hidden: Tensor) -> bool:
        """Return whether one kernel norms and routes; called per layer and step."""
        if self.deterministic or self.scoring is not None or not has_triton(hidden):
            return False
        return find(self._products, hidden, self.weight).norms > 0

    def __call__(self, x: Tensor, slots: Tensor | None = None) -> Choice:
        """Choose the experts of tokens.

        Args:
            x: [T, hidden].
            slots: [T], negative for padding, which gets no experts; or None.
        """
        if has_triton(x):
            from octavo.gemm.portable.experts.router_logits import route_experts, router_logits

            x = x.to(self.weight.dtype)
            logits = router_logits(x, self.weight, deterministic=self.deterministic)
            return Choice(
                *route_experts(
                    logits,
                    self.num_chosen,
                    renormalises=self.renormalises,
                    bias=self.bias,
                    held=self.held,
                    slots=slots,
                    scoring=self.scoring,
                )
            )
        bias = None if self.bias is None else self.bias.float()
        logits = linear(x.float(), self.weight.float(), bias)
        options = {"held": self.held, "slots": slots, "scoring": self.scoring}
        return route_by_logits(logits, self.num_chosen, renormalises=self.renormalises, **options)


def route_by_logits(
    logits: Tensor,
    num_chosen: int,
    *,
    renormalises: bool,
    held: range | None = None,
    slots: Tensor | None = None,
    scoring: Scoring | None = None,
) -> Choice:
    """Choose the experts of logits [T, E] float32: the specification of the GPU's kernel."""
    if scoring is None:
        # A stable sort keeps equal logits in the order of their experts.
        values, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        weights = values[:, :num_chosen].softmax(-1) if renormalises else values.softmax(-1)[:, :num_chosen]
        order = order[:, :num_chosen]
    else:
        order, weights = _by_scores(logits, num_chosen, scoring, renormalises=renormalises)
    experts = order.to(torch.int32)
    if held is not None:
        is_held = (experts >= held.start) & (experts < held.stop)
        experts = torch.where(is_held, experts - held.start, len(held))
    if slots is not None:
        nobody = logits.shape[1] if held is None else len(held)
        experts = torch.where(slots[:, None] >= 0, experts, nobody)
    return Choice(experts, weights.contiguous())


def _by_scores(
    logits: Tensor, num_chosen: int, scoring: Scoring, *, renormalises: bool
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, [T, k] int64, and their weights."""
    scores = logits.sigmoid() if scoring.is_sigmoid else logits.softmax(-1)
    ranks = scores if scoring.bias is None else scores + scoring.bias
    if scoring.groups is not None:
        num_groups, num_chosen_groups = scoring.groups
        grouped = ranks.view(len(ranks), num_groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(num_chosen_groups, dim=-1).indices
        is_open = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=ranks.device).scatter_(
            1, best, True
        )
        ranks = grouped.masked_fill(~is_open[..., None], float("-inf")).view_as(ranks)
    order = ranks.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    weights = scores.gather(1, order)
    if renormalises:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
    if scoring.expert_factors is not None:
        weights = weights * scoring.expert_factors[order]
    return order, weights * scoring.factor
