"""Where kernels of packed weights leave their results."""

from typing import Any, NamedTuple


class Result(NamedTuple):
    """Row r of part p of K begins at out + p * stride_part + r * stride; bias may be None."""

    out: Any
    stride: Any
    stride_part: Any
    bias: Any
    factor: Any
