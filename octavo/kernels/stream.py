"""The sum into the residual stream, on the device; imported only where Triton runs."""

import triton
import triton.language as tl


@triton.jit
def add_to_stream(x, residual_at, inside):
    """Add x, float32, to a row of the residual stream in place; return the sum as stored, in float32."""
    total = x + tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    stored = total.to(residual_at.dtype.element_ty)
    tl.store(residual_at, stored, mask=inside)
    return stored.to(tl.float32)


@triton.jit
def load_row(x_ptr, residual_ptr, row, stride_x, stride_residual, column, inside, ADD: tl.constexpr):
    """Load a row of x in float32; with ADD, add it to that of the residual stream and return the sum."""
    x = tl.load(x_ptr + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x = add_to_stream(x, residual_ptr + row * stride_residual + column, inside)
    return x


@triton.jit
def inverse_rms(x, size, eps):
    """Return 1 / rms(x) of a row of `size` numbers, float32."""
    return tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
