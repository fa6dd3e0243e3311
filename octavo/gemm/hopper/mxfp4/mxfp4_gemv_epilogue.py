"""What the experts' GEMV adds to its sums: biases, the activation, or factors of experts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.gemm.hopper.mxfp4.mxfp4_gemv_tiling import COLUMNS
from octavo.kernels.activation import gate_and_up

_COLUMNS = gl.constexpr(COLUMNS)


@gluon.jit
def load_choice(operands, shape):
    """Return the token's experts and their factors, a tuple each."""
    experts = ()
    factors = ()
    for index in gl.static_range(shape.chosen):
        experts = experts + (gl.load(operands.experts + index),)  # noqa: RUF005
        factors = factors + (gl.load(operands.factors + index),)  # noqa: RUF005
    return experts, factors


@gluon.jit
def load_epilogue(operands, out, experts, number, column, inside, num_columns, shape):
    """Return what a tile needs after its products.

    Args:
        operands, out, num_columns, shape: see kernel.expert_gemv_kernel.
        experts: load_choice's.
        number: which of them gate and up are of.
        column: of the results.
        inside: which of them exist.

    Returns:
        The biases of gate and of up, or of each expert for down; and the residual, 0.0 without one.
    """
    biases = ()
    old = 0.0
    if operands.bias is not None:
        if shape.activation is None:
            for index in gl.static_range(shape.chosen):
                bias = _load_bias(operands, experts[index], column, inside, num_columns, shape)
                biases = biases + (bias,)  # noqa: RUF005
        else:
            expert = experts[0]
            for index in gl.static_range(1, shape.chosen):
                expert = gl.where(number == index, experts[index], expert)
            for half in gl.static_range(2):
                at = half * num_columns + column
                bias = _load_bias(operands, expert, at, inside, 2 * num_columns, shape)
                biases = biases + (bias,)  # noqa: RUF005
    if shape.adds:
        old = gl.load(out + column, mask=inside, other=0.0).to(gl.float32)
    return biases, old


@gluon.jit
def _load_bias(operands, expert, column, inside, num_weight_rows, shape):
    """Return biases of an expert, 0 of those that are elsewhere."""
    at = operands.bias + expert.to(gl.int64) * num_weight_rows + column
    return gl.load(at, mask=inside & (expert < shape.held), other=0.0).to(gl.float32)


@gluon.jit
def finish(sums, biases, factors, shape, OUT: gl.constexpr):
    """Return the results of a tile, without the residual.

    Args:
        sums: of the warps, [2, W, rows] in shared memory: of gate and of up; of down only the first, of one
            expert and the next, times their factors.
        biases: load_epilogue's.
        factors: load_choice's.
        shape: see kernel.
        OUT: layout of the results.
    """
    if shape.activation is None:
        result = gl.sum(sums.index(0).slice(0, _COLUMNS, 1).load(OUT.parent), 0)
        result += gl.sum(sums.index(0).slice(_COLUMNS, _COLUMNS, 1).load(OUT.parent), 0)
        for index in gl.static_range(len(biases)):
            result += factors[index] * biases[index]
    else:
        gate = gl.sum(sums.index(0).load(OUT.parent), 0)
        up = gl.sum(sums.index(1).load(OUT.parent), 0)
        if len(biases) > 0:
            gate += biases[0]
            up += biases[1]
        result = gate_and_up(gate, up, shape.activation)
    return result
