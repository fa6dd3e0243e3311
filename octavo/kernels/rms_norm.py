"""The root-mean-square norm as one GPU kernel; imported only where Triton runs.

Each program keeps one row in registers, so every input is read once.
"""

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.kernels.device import power_of_two
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous
from octavo.kernels.rows import new_rows
from octavo.kernels.stream import inverse_rms, load_row

_MAX_ROW = 65536
# Values per warp: 8 per thread, one 16-byte access in half precision.
_VALUES_PER_WARP = 256


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, delta: Tensor | None = None) -> Tensor:
    """Add delta, if any, to x in place, and return x / rms(x) * weight, computed in float32.

    The norm is that of the sum as stored, rounded to its dtype: the same as adding first and normalising
    afterwards.

    Args:
        x: [T, C] bfloat16, float16 or float32; rows any stride apart, last dimension contiguous.
        weight: [C] contiguous, any floating dtype.
        eps: added to the mean square.
        delta: [T, C] like x, or None.

    Returns:
        A new contiguous [T, C], dtype of x.

    Raises:
        InvalidArgumentError: a shape, dtype or stride does not fit.

    Source: Zhang and Sennrich 2019.
    """
    check_rows(x, weight, delta)
    num_rows, size = x.shape
    out = new_rows(x, num_rows, size)
    if num_rows == 0:
        return out
    block, num_warps = tile_of(size)
    # With ADD, the kernel adds its first tensor to its second one.
    first = x if delta is None else delta
    launch(
        _rms_norm_kernel,
        (num_rows,),
        x_ptr=first,
        residual_ptr=x,
        weight_ptr=weight,
        out_ptr=out,
        stride_x=first.stride(0),
        stride_residual=x.stride(0),
        size=size,
        eps=eps,
        ADD=delta is not None,
        BLOCK=block,
        num_warps=num_warps,
        **overlap_options(x),
    )
    return out


def check_rows(x: Tensor, weight: Tensor, delta: Tensor | None) -> None:
    size = weight.numel()
    if x.ndim != 2 or x.shape[1] != size or x.stride(1) != 1 or not weight.is_contiguous():
        raise InvalidArgumentError(
            f"x must be [T, {size}] for a contiguous weight of {size}, its last dimension contiguous; "
            f"got shape {list(x.shape)}, strides {list(x.stride())}"
        )
    if size > _MAX_ROW:
        raise InvalidArgumentError(f"rows must hold at most {_MAX_ROW} values, got {size}")
    if delta is not None and (delta.shape != x.shape or delta.dtype != x.dtype or delta.stride(1) != 1):
        raise InvalidArgumentError(
            f"delta must be like x, {list(x.shape)} {x.dtype}, its last dimension contiguous; "
            f"got {list(delta.shape)} {delta.dtype}, strides {list(delta.stride())}"
        )


@cache
def tile_of(size: int) -> tuple[int, int]:
    """Return (values, warps) of a program for rows of a size."""
    block = power_of_two(size)
    return block, min(16, max(1, block // _VALUES_PER_WARP))


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, stride_x, stride_residual, size, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (T,). Without ADD the residual is not touched."""
    start_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    # It is part of the model, so it need not wait.
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    x = load_row(x_ptr, residual_ptr, row, stride_x, stride_residual, column, inside, ADD)
    out = x * inverse_rms(x, size, eps) * weight
    tl.store(out_ptr + row * size + column, out.to(out_ptr.dtype.element_ty), mask=inside)
