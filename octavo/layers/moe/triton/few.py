"""Experts of 1 to 4 tokens: every pair by itself, without tensor cores; imported only where Triton runs.

So few tokens mostly choose different experts, so there is nothing to sort. The time goes to loading weights
and to launches: the first kernel also applies the activation, the second sums over a token's experts.
"""

from typing import Any, NamedTuple

from torch import Tensor

from octavo.gpu.device import power_of_two
from octavo.gpu.launch import launch, overlap_options
from octavo.layers.linear.skinny_tiling import Tiling
from octavo.layers.moe.mxfp4_weight import Mxfp4ExpertWeight
from octavo.layers.moe.packed_weight import PackedExpertWeight
from octavo.layers.moe.router import Choice
from octavo.layers.moe.tiling import AnyExpertWeight
from octavo.layers.moe.triton import few_kernels, mxfp4_few_kernels
from octavo.layers.moe.triton.mxfp4 import UNITS


def few_gate_up(
    x: Tensor, weight: AnyExpertWeight, experts: Tensor, activation: str, tiling: Tiling
) -> Tensor:
    """Return activation(gate) * up of every pair; sums are float32.

    Args:
        x: [T, K] bfloat16, float16 or float32; rows any stride apart, last dimension contiguous.
        weight: [E, 2 n, K] = [gate | up].
        experts: [T, k] int32, contiguous.
        activation: its name; see layers.triton.activation.
        tiling: columns count rows of the weight, gate and up.

    Returns:
        A new [T k, n], dtype of x.
    """
    num_weight_rows, num_pairs, form = weight.shape[1], experts.numel(), _form_of(weight, tiling)
    out = x.new_empty(num_pairs, num_weight_rows // 2)
    launch(
        form.kernels.few_gate_up_kernel,
        (-(-num_weight_rows // tiling.columns), num_pairs),
        *(x, weight.values, form.scales, weight.bias, experts, out, num_weight_rows, x.stride(0)),
        *(*form.width, experts.shape[1], form.size, activation, tiling.columns, form.depth),
        num_warps=tiling.num_warps,
        **overlap_options(x),
    )
    return out


def few_down(
    x: Tensor, weight: AnyExpertWeight, choice: Choice, residual: Tensor | None, tiling: Tiling
) -> Tensor:
    """Return the sums of each token's products times its weights; sums are float32.

    Args:
        x: [T k, n] of few_gate_up.
        weight: [E, H, n].
        choice: each token's experts and their weights, contiguous.
        residual: [T, H], rows any stride apart: the sums are added to it in place; or None.
        tiling: of a program; depth is at most that of a row.

    Returns:
        residual, or a new [T, H], dtype of x.
    """
    (num_tokens, num_chosen), num_columns = choice.experts.shape, weight.shape[1]
    form = _form_of(weight, tiling)
    out = x.new_empty(num_tokens, num_columns) if residual is None else residual
    launch(
        form.kernels.few_down_kernel,
        (-(-num_columns // tiling.columns), num_tokens),
        *(x, weight.values, form.scales, weight.bias, *choice, out, num_columns, out.stride(0)),
        *(*form.width, num_chosen, form.size, tiling.columns, form.depth, residual is not None),
        num_warps=tiling.num_warps,
        **overlap_options(x),
    )
    return out


class _Form(NamedTuple):
    """How kernels read a form of weights.

    Attributes:
        kernels: module of the kernels.
        scales: tensor of scales; not read where there are none.
        width: values that share a scale, if that can vary.
        size: what a row has: values, or units of MXFP4.
        depth: of these, how many a program loads at once.
    """

    kernels: Any
    scales: Tensor
    width: tuple[int, ...]
    size: int
    depth: int


def _form_of(weight: AnyExpertWeight, tiling: Tiling) -> _Form:
    assert not isinstance(weight, PackedExpertWeight), "packed experts have the grouped GEMM only"
    size = weight.values.shape[2]
    if isinstance(weight, Mxfp4ExpertWeight):
        depth = min(tiling.depth // 4, max(UNITS.value, power_of_two(size)))
        return _Form(mxfp4_few_kernels, weight.exponents, (), size, depth)
    scales = weight.values if weight.scales is None else weight.scales
    depth = min(tiling.depth, max(16, power_of_two(size)))
    return _Form(few_kernels, scales, (weight.width,), size, depth)
