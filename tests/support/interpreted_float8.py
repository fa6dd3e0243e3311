"""Conversions to and from float8 in Triton's interpreter as a GPU does them."""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_DTYPES = {tl.float8e4nv: torch.float8_e4m3fn, tl.float16: torch.float16, tl.float32: torch.float32}
_convert_float = interpreter._convert_float


def _convert_exactly(data, source, target, rounding_mode):
    """Triton 3.6 loses the carry when it rounds to float8, and converts NaN to 480: torch does neither."""
    if tl.float8e4nv not in (source, target):
        return _convert_float(data, source, target, rounding_mode)
    numbers = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8)).view(_DTYPES[source])
    converted = numbers.float().to(_DTYPES[target]).view(torch.uint8).numpy()
    return converted.view(f"u{target.primitive_bitwidth // 8}").reshape(data.shape)


def patch() -> None:
    """Replace the interpreter's conversions."""
    interpreter._convert_float = _convert_exactly
