"""The GEMM of 5 to 256 rows for Hopper GPUs, y = epilogue(x W^T); imported only where Triton runs.

With more rows than the skinny GEMM supports, tensor cores do the arithmetic; reading the weights and
starting up still take most of the time. So one warp fetches weights by TMA as soon as the program starts,
while the previous kernel still runs, and only then waits for the rows of x, which that kernel writes:

    kernel before   ................ done
    TMA warp           w0 w1 w2 ...  | x0 x1 x2 ...
    warpgroup                        |    0  1  2 ...   epilogue

hopper_kernel draws its warps, barriers and buffers. A program multiplies a tile of rows by a tile of weights
over all of K, in one order: a row's result depends on its own values and on the tiling, never on what the
other rows hold.
"""

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.errors import InvalidArgumentError
from octavo.gpu.launch import launch, overlap_options
from octavo.layers.linear.hopper_kernel import Result, Shape, linear_kernel
from octavo.layers.linear.hopper_tiling import ATOM, HopperTiling, choose_hopper_tiling, unsupported_reason
from octavo.layers.linear.operands import check_vector, make_result


def hopper_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    tiling: HopperTiling | None = None,
) -> Tensor:
    """Return epilogue(x W^T + bias); sums are float32.

    The previous kernel must not write weight: this one may read it while that one runs.

    Args:
        x, weight: [M, K] and [N, K], see hopper_tiling.unsupported_reason; with an activation, weight is
            [gate | up] along N.
        bias, activation, residual: see skinny_linear.
        tiling: None: choose_hopper_tiling's.

    Returns:
        residual, or a new contiguous [M, N] or [M, N / 2], dtype of x.

    Raises:
        InvalidArgumentError: unsupported_reason gives one, or another shape, dtype, stride or tiling does
            not fit.
    """
    reason = unsupported_reason(x, weight)
    if reason is not None:
        raise InvalidArgumentError(f"hopper_linear cannot run: {reason}")
    if bias is not None:
        check_vector("bias", bias, weight.shape[0])
    halves = 1 if activation is None else 2
    (num_rows, size), num_columns = x.shape, weight.shape[0] // halves
    out = make_result(x, weight.shape[0], activation, residual)
    if tiling is None:
        tiling = choose_hopper_tiling(num_rows, weight.shape[0], size, is_gated=halves == 2)
    num_tiles = -(-size // tiling.depth)
    if not min(2, num_tiles) <= tiling.row_stages <= tiling.weight_stages:
        raise InvalidArgumentError(
            f"a tiling needs 2 row_stages or more, and as many weight_stages or more, got {tiling}"
        )
    shape = Shape(
        *(tiling.rows, halves, tiling.columns, tiling.depth // ATOM),
        *(tiling.weight_stages, tiling.row_stages, activation, residual is not None),
    )
    launch(
        linear_kernel,
        (-(-num_columns // tiling.columns), -(-num_rows // tiling.rows)),
        _matrix(x, [shape.rows, ATOM]),
        _matrix(weight.view(halves, num_columns, size), [halves, tiling.columns, ATOM]),
        Result(out, out.stride(0), num_columns, bias),
        num_rows,
        num_tiles,
        Shape(*map(gl.constexpr, shape)),
        num_warps=4,
        # The TMA warp needs few registers, so the warpgroup gets most of its share.
        maxnreg=80 if halves * tiling.columns <= 64 else 128,
        launch_pdl=overlap_options(x)["OVERLAP"],
    )
    return out


def _matrix(tensor: Tensor, tile: list[int]) -> TensorDescriptor:
    """Describe a tensor to TMA; what lies outside of it reads as zero."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(tile))
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), tile, layout)
