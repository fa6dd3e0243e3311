"""What TMA needs to know of a tensor; imported only where Triton runs."""

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def describe_matrix(tensor: Tensor, tile: list[int], *, swizzle_bytes: int = 128) -> TensorDescriptor:
    """Describe a tensor and the tiles that TMA copies of it; what lies outside of it reads as zero."""
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle_bytes, element_bitwidth=8 * tensor.itemsize, rank=len(tile)
    )
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), tile, layout)
