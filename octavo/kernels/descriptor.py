"""Tensors described to TMA; imported only where Triton runs."""

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.kernels.padded_rows import readable_rows


def describe_matrix(tensor: Tensor, tile: list[int], *, swizzle_bytes: int = 128) -> TensorDescriptor:
    """Describe a tensor and the tiles that TMA copies; whatever lies outside the tensor reads as zero."""
    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), tile, _layout(tensor, tile, swizzle_bytes)
    )


def describe_rows(x: Tensor, tile: list[int], num_tiles: int = 1) -> TensorDescriptor:
    """Describe rows of x [M, K], of which kernels use only the first M: rows beyond may read as anything.

    Args:
        x: M at least 1, last dimension contiguous.
        tile: rows and columns that TMA copies.
        num_tiles: vertically adjacent tiles that a kernel copies even if only some of them have rows.
    """
    shape = [readable_rows(x, tile[0] * num_tiles), x.shape[1]]
    return TensorDescriptor(x, shape, list(x.stride()), tile, _layout(x, tile, 128))


def _layout(tensor: Tensor, tile: list[int], swizzle_bytes: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle_bytes, element_bitwidth=8 * tensor.itemsize, rank=len(tile)
    )
