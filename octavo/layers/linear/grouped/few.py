"""The skinny GEMM with a packed weight, 1 to 16 rows: y = epilogue(prologue(x) W^T); only where Triton runs.

few_kernel, for NVIDIA GPUs only, multiplies integers as they are and scales the sum of each group in float32.
A row's result depends on its own values, the tiling and the number of rows, never on the other rows.
"""

from torch import Tensor
from triton.experimental.gluon import language as gl

from octavo.errors import InvalidArgumentError
from octavo.gpu.launch import launch, overlap_options
from octavo.layers.linear.grouped.few_kernel import Shape, few_linear_kernel
from octavo.layers.linear.grouped.operands import check_product
from octavo.layers.linear.grouped.tiling import FEW_MAX_ROWS, FewTiling, choose_few_tiling
from octavo.layers.linear.grouped.weight import GroupedWeight
from octavo.layers.linear.operands import check_vector


def few_linear(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    residual: Tensor | None = None,
    tiling: FewTiling | None = None,
) -> Tensor:
    """Return epilogue(prologue(x) W^T + bias); sums are float32.

    The previous kernel must not write weight, bias or norm_weight: this one may read them while that one
        runs.

    Args:
        x: [M, K] float16 or bfloat16, 1 <= M <= FEW_MAX_ROWS, columns in the weight's order; rows any stride
            apart.
        weight: [N, K]; with an activation [gate | up] along N.
        bias, activation, residual: see skinny.skinny_linear.
        norm_weight, eps: likewise, for a single row.
        tiling: None: choose_few_tiling's.

    Returns:
        residual, or a new contiguous [M, N] or [M, N / 2], dtype of x.

    Raises:
        InvalidArgumentError: a shape, dtype or stride does not fit.
    """
    out = check_product(x, weight, bias, activation, residual)
    num_rows, (num_weight_rows, size) = x.shape[0], weight.shape
    if not 1 <= num_rows <= FEW_MAX_ROWS:
        raise InvalidArgumentError(f"x must be [M, K] with 1 <= M <= {FEW_MAX_ROWS}, got {list(x.shape)}")
    if norm_weight is not None and num_rows > 1:
        raise InvalidArgumentError(f"a norm needs a single row of x, got {num_rows}")
    if norm_weight is not None:
        check_vector("norm_weight", norm_weight, size)
    halves = 1 if activation is None else 2
    if tiling is None:
        tiling = choose_few_tiling(num_rows, num_weight_rows, size)
    overlap = overlap_options(x)["OVERLAP"]
    shape = Shape(
        *(weight.bits, weight.group, size, 1 if num_rows == 1 else 8 if num_rows <= 8 else 16),
        *(tiling.columns, tiling.num_warps, tiling.num_stages),
        *(norm_weight is not None, bias is not None, activation, residual is not None, overlap),
    )
    launch(
        few_linear_kernel,
        (-(-num_weight_rows // halves // (tiling.columns // halves)),),
        *(x, weight.words, weight.pairs, x if bias is None else bias),
        *(x if norm_weight is None else norm_weight, out),
        *(num_rows, num_weight_rows, x.stride(0), out.stride(0), weight.factor, eps),
        Shape(*map(gl.constexpr, shape)),
        num_warps=tiling.num_warps,
        launch_pdl=overlap,
    )
    return out
