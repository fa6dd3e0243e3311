"""Gated activations on a GPU, one launch each; imported only where Triton runs."""

import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import InvalidArgumentError, suggest
from octavo.kernels.clamped_swiglu import LIMIT, SLOPE
from octavo.kernels.clamped_swiglu import NAME as CLAMPED
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous
from octavo.kernels.padded_rows import new_rows

NAMES = ("silu", "gelu", "gelu_tanh")
_ALL_NAMES = (*NAMES, CLAMPED)
_BLOCK = 1024
_LIMIT, _SLOPE = tl.constexpr(LIMIT), tl.constexpr(SLOPE)
_CLAMPED = tl.constexpr(CLAMPED)


def gated_activation(gate_up: Tensor, name: str) -> Tensor:
    """Return activation(gate) * up of a fused projection, computed in float32.

    Args:
        gate_up: [T, 2 F] = [gate | up], bfloat16, float16 or float32; rows any stride apart, last dimension
            contiguous.
        name: "silu", "gelu" (exact, with erf), "gelu_tanh" (its tanh approximation) or "clamped_swiglu" (see
            layers.clamped_swiglu).

    Returns:
        A new contiguous [T, F], dtype of gate_up.

    Raises:
        InvalidArgumentError: the name is unknown, or the shape or stride does not fit.
    """
    if name not in _ALL_NAMES:
        raise InvalidArgumentError(
            f"the activation must be one of {', '.join(_ALL_NAMES)}, got {name!r}{suggest(name, _ALL_NAMES)}"
        )
    shape = gate_up.shape
    if len(shape) != 2 or shape[1] % 2 or gate_up.stride(1) != 1:
        raise InvalidArgumentError(
            "gate_up must be [T, 2 F] with a contiguous last dimension, "
            f"got shape {list(shape)}, strides {list(gate_up.stride())}"
        )
    num_rows, size = shape[0], shape[1] // 2
    out = new_rows(gate_up, num_rows, size)
    if num_rows and size:
        launch(
            _gated_activation_kernel,
            (num_rows, -(-size // _BLOCK)),
            gate_up_ptr=gate_up,
            out_ptr=out,
            stride_gate_up=gate_up.stride(0),
            size=size,
            NAME=name,
            BLOCK=_BLOCK,
            **overlap_options(gate_up),
        )
    return out


@triton.jit
def activate(gate, NAME: tl.constexpr):
    """Return the activation of float32 values."""
    if NAME == "silu":
        return gate * tl.sigmoid(gate)
    elif NAME == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # (1 + tanh(z)) / 2 = sigmoid(2 z), with z = sqrt(2 / pi) (g + 0.044715 g^3).
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))


@triton.jit
def gate_and_up(gate, up, NAME: tl.constexpr):
    """Return activation(gate) * up of float32 values, or what "clamped_swiglu" makes of them."""
    if NAME == _CLAMPED:
        gate = tl.minimum(gate, _LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -_LIMIT, _LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return (up + 1.0) * gate * tl.sigmoid(_SLOPE * gate)
    else:
        return activate(gate, NAME) * up


@triton.jit
def _gated_activation_kernel(
    gate_up_ptr, out_ptr, stride_gate_up, size,
    NAME: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (T, ceil(F / BLOCK))."""
    start_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    wait_for_previous(OVERLAP)
    gate_at = gate_up_ptr + row * stride_gate_up + column
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + size, mask=inside, other=0.0).to(tl.float32)
    out = gate_and_up(gate, up, NAME).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + column, out, mask=inside)
