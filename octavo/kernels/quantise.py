"""Rows rounded to float8 with a scale each, on a GPU; imported only where Triton runs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.kernels.device import num_multiprocessors, power_of_two
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous
from octavo.kernels.rows import new_rows
from octavo.kernels.stream import inverse_rms, load_row

_MAX_ROW = 65536
# (most warps of a program, numbers of a warp): many rows come at the rate of memory, few ones sooner.
_MANY_ROWS, _FEW_ROWS = (8, 1024), (16, 256)
# Up to so many programs on an SM, rows are few.
_FEW_PROGRAMS = 2
# The smallest scale, of a row of zeros: the smallest normal float32.
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)
_LARGEST = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)


def quantise_rows(
    x: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    *,
    delta: Tensor | None = None,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Round rows of x, or of its norm, to float8; see linear.float8.weight.quantise_rows, the specification.

    Args:
        x: [T, K] bfloat16, float16 or float32; rows any stride apart, last dimension contiguous.
        norm_weight: [K] contiguous: x / rms(x) * norm_weight takes the place of x; None: no norm.
        eps: added to the mean square.
        delta: [T, K] like x, which is first added to x in place, or None.
        width: numbers of a row that share a scale, a power of two that divides K; None: all.

    Returns:
        Numbers [T, K] float8, contiguous, and scales [T, K / width] float32, the scales of a column side by
        side.

    Raises:
        InvalidArgumentError: a shape or stride does not fit.
    """
    num_rows, size = _check(x, norm_weight, delta)
    block = power_of_two(size)
    num_scales = 1 if width is None else size // width
    out = new_rows(x, num_rows, size, torch.float8_e4m3fn)
    scales = torch.empty(num_scales, num_rows, dtype=torch.float32, device=x.device).t()
    if num_rows == 0:
        return out, scales
    first = x if delta is None else delta
    launch(
        _quantise_kernel,
        (num_rows,),
        x_ptr=first,
        residual_ptr=x,
        weight_ptr=out if norm_weight is None else norm_weight,
        out_ptr=out,
        scale_ptr=scales,
        stride_x=first.stride(0),
        stride_residual=x.stride(0),
        num_rows=num_rows,
        size=size,
        eps=eps,
        ADD=delta is not None,
        NORM=norm_weight is not None,
        WIDTH=width or block,
        BLOCK=block,
        num_warps=_num_warps(num_rows, block, x.device),
        **overlap_options(x),
    )
    return out, scales


def _num_warps(num_rows: int, block: int, device: torch.device) -> int:
    is_few = num_rows <= _FEW_PROGRAMS * num_multiprocessors(device)
    most, values = _FEW_ROWS if is_few else _MANY_ROWS
    return min(most, max(1, block // values))


def _check(x: Tensor, norm_weight: Tensor | None, delta: Tensor | None) -> tuple[int, int]:
    if x.ndim != 2 or x.stride(1) != 1 or x.shape[1] > _MAX_ROW:
        raise InvalidArgumentError(
            f"x must be [T, K] with a contiguous last dimension of at most {_MAX_ROW}, "
            f"got shape {list(x.shape)}, strides {list(x.stride())}"
        )
    if norm_weight is not None and (norm_weight.shape != x.shape[1:] or not norm_weight.is_contiguous()):
        raise InvalidArgumentError(f"norm_weight must be [{x.shape[1]}], got {list(norm_weight.shape)}")
    if delta is not None and (delta.shape != x.shape or delta.dtype != x.dtype or delta.stride(1) != 1):
        raise InvalidArgumentError(
            f"delta must be like x, {list(x.shape)} {x.dtype}, its last dimension contiguous; "
            f"got {list(delta.shape)} {delta.dtype}, strides {list(delta.stride())}"
        )
    return x.shape[0], x.shape[1]


@triton.jit(do_not_specialize=["num_rows"])
def _quantise_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, stride_x, stride_residual, num_rows, size, eps,
    ADD: tl.constexpr, NORM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (T,). Without ADD the residual is not touched."""
    start_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    if NORM:
        # It is part of the model, so it need not wait.
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    x = load_row(x_ptr, residual_ptr, row, stride_x, stride_residual, column, inside, ADD)
    if NORM:
        x = x * inverse_rms(x, size, eps) * weight
    groups = tl.reshape(x, [BLOCK // WIDTH, WIDTH])
    scale = tl.maximum(tl.max(tl.abs(groups), axis=1) / _LARGEST, _SMALLEST)
    # What is no number stays so: its token's results must not look like some.
    groups = tl.clamp(groups / scale[:, None], -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    out = tl.reshape(groups, [BLOCK]).to(tl.float8e4nv)
    tl.store(out_ptr + row * size + column, out, mask=inside)
    group = tl.arange(0, BLOCK // WIDTH)
    tl.store(scale_ptr + group * num_rows + row, scale, mask=group * WIDTH < size)
