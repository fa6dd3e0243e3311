"""The root-mean-square norm, and rows rounded to float8, as one GPU kernel; imported only where Triton runs.

Each program keeps one row in registers, so every input is read once.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.kernels.device import num_multiprocessors, power_of_two
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous
from octavo.kernels.padded_rows import new_rows

_MAX_ROW = 65536
# Values per warp: 8 per thread, one 16-byte access in half precision.
_VALUES_PER_WARP = 256
# Most warps of a program that quantises, and values per warp. Many rows are bound by memory; a few rows
# finish sooner with more warps each.
_MANY_ROWS, _FEW_ROWS = (8, 1024), (16, 256)
# Up to this many programs per SM, rows are few.
_FEW_PROGRAMS = 2


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, delta: Tensor | None = None, stream_scale: float = 1.0
) -> Tensor:
    """Add delta, if any, to x in place, and return x / rms(x) * weight, computed in float32.

    The norm is that of the sum as stored, rounded to its dtype: the same as adding first and normalising
    afterwards.

    Args:
        x: [T, C] bfloat16, float16 or float32; rows any stride apart, last dimension contiguous.
        weight: [C] contiguous, any floating dtype.
        eps: added to the mean square.
        delta: [T, C] like x, or None.
        stream_scale: factor of x before delta is added.

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
    tile = {"width": 0, "block": block, "num_warps": num_warps}
    _launch(x, delta, weight, out, None, eps, stream_scale, **tile)
    return out


def quantise_rows(
    x: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    *,
    delta: Tensor | None = None,
    stream_scale: float = 1.0,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Round rows of x, or of its norm, to float8; forms.float8.quantise_rows is the specification.

    Args:
        x: [T, K] bfloat16, float16 or float32; rows any stride apart, last dimension contiguous.
        norm_weight: [K] contiguous: x / rms(x) * norm_weight takes the place of x; None: no norm.
        eps: added to the mean square.
        delta: [T, K] like x, which is first added to x in place, or None.
        stream_scale: factor of x before delta is added.
        width: numbers of a row that share a scale, a power of two that divides K; None: all.

    Returns:
        Numbers [T, K] float8, contiguous, and scales [T, K / width] float32, the scales of a column side by
        side.

    Raises:
        InvalidArgumentError: a shape or stride does not fit.
    """
    num_rows, size = _check(x, norm_weight, delta)
    num_scales = 1 if width is None else size // width
    out = new_rows(x, num_rows, size, torch.float8_e4m3fn)
    scales = torch.empty(num_scales, num_rows, dtype=torch.float32, device=x.device).t()
    if num_rows == 0:
        return out, scales
    block = power_of_two(size)
    num_warps = _num_warps(num_rows, block, x.device)
    tile = {"width": width or block, "block": block, "num_warps": num_warps}
    _launch(x, delta, norm_weight, out, scales, eps, stream_scale, **tile)
    return out, scales


def _launch(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    scales: Tensor | None,
    eps: float,
    stream_scale: float,
    *,
    width: int,
    block: int,
    num_warps: int,
) -> None:
    """Launch the kernel; with a delta, it adds its first tensor to its second one."""
    first = x if delta is None else delta
    launch(
        _rms_norm_kernel,
        (x.shape[0],),
        x_ptr=first,
        residual_ptr=x,
        weight_ptr=weight,
        out_ptr=out,
        scale_ptr=scales,
        stride_x=first.stride(0),
        stride_residual=x.stride(0),
        size=x.shape[1],
        eps=eps,
        stream_scale=stream_scale,
        ADD=delta is not None,
        WIDTH=width,
        BLOCK=block,
        num_warps=num_warps,
        **overlap_options(x),
    )


@cache
def tile_of(size: int) -> tuple[int, int]:
    """Return (values, warps) of a program for rows of a size."""
    block = power_of_two(size)
    return block, min(16, max(1, block // _VALUES_PER_WARP))


def _num_warps(num_rows: int, block: int, device: torch.device) -> int:
    is_few = num_rows <= _FEW_PROGRAMS * num_multiprocessors(device)
    most, values = _FEW_ROWS if is_few else _MANY_ROWS
    return min(most, max(1, block // values))


def check_rows(x: Tensor, weight: Tensor, delta: Tensor | None) -> None:
    size = weight.numel()
    if x.ndim != 2 or x.shape[1] != size or x.stride(1) != 1 or not weight.is_contiguous():
        raise InvalidArgumentError(
            f"x must be [T, {size}] for a contiguous weight of {size}, its last dimension contiguous; "
            f"got shape {list(x.shape)}, strides {list(x.stride())}"
        )
    if size > _MAX_ROW:
        raise InvalidArgumentError(f"rows must hold at most {_MAX_ROW} values, got {size}")
    _check_delta(x, delta)


def _check(x: Tensor, norm_weight: Tensor | None, delta: Tensor | None) -> tuple[int, int]:
    if x.ndim != 2 or x.stride(1) != 1 or x.shape[1] > _MAX_ROW:
        raise InvalidArgumentError(
            f"x must be [T, K] with a contiguous last dimension of at most {_MAX_ROW}, "
            f"got shape {list(x.shape)}, strides {list(x.stride())}"
        )
    if norm_weight is not None and (norm_weight.shape != x.shape[1:] or not norm_weight.is_contiguous()):
        raise InvalidArgumentError(f"norm_weight must be [{x.shape[1]}], got {list(norm_weight.shape)}")
    _check_delta(x, delta)
    return x.shape[0], x.shape[1]


def _check_delta(x: Tensor, delta: Tensor | None) -> None:
    if delta is not None and (delta.shape != x.shape or delta.dtype != x.dtype or delta.stride(1) != 1):
        raise InvalidArgumentError(
            f"delta must be like x, {list(x.shape)} {x.dtype}, its last dimension contiguous; "
            f"got {list(delta.shape)} {delta.dtype}, strides {list(delta.stride())}"
        )


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, stride_x, stride_residual, size, eps,
    stream_scale, ADD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (T,). Without a weight, rows are not normed.

    Args:
        ADD: whether x is first added to stream_scale times the residual, which is not touched otherwise.
        WIDTH: numbers of a row that share a scale; 0: results are not rounded to float8.
    """
    start_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    if weight_ptr is not None:
        # The model's own weight, which no kernel writes: no need to wait.
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    x = load_row(x_ptr, residual_ptr, row, stride_x, stride_residual, column, inside, ADD, stream_scale)
    if weight_ptr is not None:
        x = x * inverse_rms(x, size, eps) * weight
    if WIDTH > 0:
        # Constants of the module would be compared at every launch.
        LARGEST: tl.constexpr = 448.0
        # The scale of a row of zeros: the smallest normal float32.
        SMALLEST: tl.constexpr = 2.0**-126
        groups = tl.reshape(x, [BLOCK // WIDTH, WIDTH])
        scale = tl.maximum(tl.max(tl.abs(groups), axis=1) / LARGEST, SMALLEST)
        # NaN stays NaN: its token's results must not look like numbers.
        groups = tl.clamp(groups / scale[:, None], -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        x = tl.reshape(groups, [BLOCK])
        group = tl.arange(0, BLOCK // WIDTH)
        tl.store(scale_ptr + group * tl.num_programs(0) + row, scale, mask=group * WIDTH < size)
    tl.store(out_ptr + row * size + column, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_to_stream(x, residual_at, inside, stream_scale=1.0):
    """Add x, float32, to a scaled row of the residual stream in place; return the sum as stored, float32."""
    total = x + stream_scale * tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    stored = total.to(residual_at.dtype.element_ty)
    tl.store(residual_at, stored, mask=inside)
    return stored.to(tl.float32)


@triton.jit
def load_row(
    x_ptr, residual_ptr, row, stride_x, stride_residual, column, inside, ADD: tl.constexpr, stream_scale
):
    """Load a row of x in float32; with ADD, add it to that of the residual stream and return the sum."""
    x = tl.load(x_ptr + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x = add_to_stream(x, residual_ptr + row * stride_residual + column, inside, stream_scale)
    return x


@triton.jit
def inverse_rms(x, size, eps):
    """Return 1 / rms(x) of a row of `size` numbers, float32."""
    return tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
