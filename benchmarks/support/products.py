"""A decoder's products of matrices with random weights in every form, as its blocks run them on a GPU."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from octavo.forms.base import QuantisedWeight
from octavo.forms.blocks import BlockWeight
from octavo.forms.float8 import FLOAT8, Float8Weight, quantise
from octavo.gemm.linear import Linear
from octavo.kernels.activation import gated_activation
from octavo.kernels.rms_norm import rms_norm
from octavo.layers import BlockInput, BlockOutput, RMSNorm, make_linear, make_quantised_linear
from octavo.parallel import TensorParallel

EPS = 1e-6
# Rates of an H200: bytes, and operations in bfloat16 and float8.
BYTES_PER_SECOND, FLOPS, FLOAT8_FLOPS = 4.8e12, 989e12, 1979e12
# Bytes of weights in one graph: several times an L2 cache of 60 MB.
_ROTATED_BYTES = 400e6
_MAX_COPIES = 56
_TILE = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """One of a decoder's products: weight [num_weight_rows, size], and what is fused with it."""

    name: str
    num_weight_rows: int
    size: int
    has_norm: bool = False
    activation: str | None = None
    adds: bool = False

    @property
    def num_columns(self) -> int:
        """Columns of the result."""
        return self.num_weight_rows // (1 if self.activation is None else 2)

    @property
    def num_weights(self) -> int:
        """Numbers of the weight."""
        return self.num_weight_rows * self.size


def decoder_shapes(hidden: int, heads: int, kv_heads: int, inner: int) -> tuple[Shape, ...]:
    """Return a Qwen3 decoder's products, with heads of 128, in the order in which a layer runs them."""
    return (
        Shape("o", hidden, 128 * heads, adds=True),
        Shape("gate_up", 2 * inner, hidden, has_norm=True, activation="silu"),
        Shape("down", hidden, inner, adds=True),
        Shape("qkv", 128 * (heads + 2 * kv_heads), hidden, has_norm=True),
        Shape("lm_head", 151936, hidden, has_norm=True),
    )


MODELS = {"0.6b": decoder_shapes(1024, 16, 8, 3072), "8b": decoder_shapes(4096, 32, 8, 12288)}


def random_numbers(*sizes: int) -> Tensor:
    """Return small bfloat16 numbers on the GPU."""
    return torch.randn(*sizes, dtype=torch.bfloat16, device="cuda") * 0.02


def random_blocks(num_rows: int, size: int, bits: int, group: int, *, mins: bool) -> BlockWeight:
    """Return a weight of random integers on the GPU."""
    low, high, dtype = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    quants = torch.randint(low, high, (num_rows, size), dtype=dtype, device="cuda")
    scales = torch.rand(num_rows, size // group, dtype=torch.float16, device="cuda") * 0.002
    return BlockWeight(bits, quants, scales, -8 * scales if mins else None)


def _float8_tiles(num_rows: int, size: int) -> Float8Weight:
    """Return a float8 weight with a scale for each 128 x 128 numbers, all alike: only speed is measured."""
    scales = torch.full((-(-num_rows // _TILE), -(-size // _TILE)), 1e-3, device="cuda")
    return Float8Weight((random_numbers(num_rows, size) * 1e3).to(FLOAT8), scales, _TILE, _TILE)


def _quantised(make: Callable[[int, int], QuantisedWeight], num_rows: int, size: int) -> Linear:
    return make_quantised_linear([make(num_rows, size)], dtype=torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Form:
    """How weights are stored.

    Attributes:
        make: (N, K) -> a linear layer with a random weight.
        bytes_per_number: of the weight, scales included.
        flops: operations a second that products of many rows may reach.
    """

    make: Callable[[int, int], Linear]
    bytes_per_number: float
    flops: float = FLOPS


def _blocks(bits: int, group: int, mins: bool) -> Form:
    make = partial(random_blocks, bits=bits, group=group, mins=mins)
    return Form(partial(_quantised, make), bits / 8 + 4 / group)


FORMS: Mapping[str, Form] = {
    "bf16": Form(lambda num_rows, size: make_linear(random_numbers(num_rows, size)), 2),
    "fp8": Form(
        partial(_quantised, lambda num_rows, size: quantise(random_numbers(num_rows, size))), 1, FLOAT8_FLOPS
    ),
    "fp8-tiles": Form(partial(_quantised, _float8_tiles), 1, FLOAT8_FLOPS),
    "int4": _blocks(4, 128, True),
    "int4-32": _blocks(4, 32, True),
    "int8-32": _blocks(8, 32, False),
    "int8-16": _blocks(8, 16, False),
}


def bound_us(shape: Shape, form: Form, num_rows: int) -> float:
    """Microseconds to read and write everything once, or to multiply, whichever takes longer."""
    row_bytes = 2 * (shape.size + shape.num_columns * (2 if shape.adds else 1))
    num_bytes = shape.num_weights * form.bytes_per_number + num_rows * row_bytes
    operations = 2 * num_rows * shape.num_weights
    return max(num_bytes / BYTES_PER_SECOND, operations / form.flops) * 1e6


class Chain:
    """Products that follow one another, several copies of each, so that weights come from memory.

    Each block reads what the one before wrote, as in a decoder.
    """

    def __init__(self, shapes: Sequence[Shape], form: Form) -> None:
        """Make random weights for products of some shapes."""
        self.shapes, self.form = shapes, form
        num_bytes = sum(shape.num_weights for shape in shapes) * form.bytes_per_number
        copies = max(2, min(_MAX_COPIES, round(_ROTATED_BYTES / num_bytes)))
        self.layers = [[self._make_block(shape) for shape in shapes] for _ in range(copies)]

    def _make_block(self, shape: Shape) -> Any:
        own = self.form.make(shape.num_weight_rows, shape.size)
        if shape.adds:
            return BlockOutput(own, None, TensorParallel())
        return BlockInput(RMSNorm(random_numbers(shape.size), EPS), own, shape.activation)

    def run(self, layer: Sequence[Any], x: Tensor, hidden: Tensor) -> Tensor:
        """Return the last product of a layer whose first one is of x; hidden is the residual stream."""
        for shape, block in zip(self.shapes, layer, strict=True):
            if not shape.adds:
                x = block(hidden, None)
                continue
            delta = block(x[:, : shape.size], hidden)
            if delta is not None:
                hidden.add_(delta)
        return x

    def microseconds(self, num_rows: int) -> float:
        """Median time of a layer for some rows."""
        first = self.shapes[0]
        x = random_numbers(num_rows, first.size)
        hidden = random_numbers(num_rows, first.num_columns) if first.adds else x
        return microseconds(lambda layer: self.run(layer, x, hidden), self.layers)


def torch_microseconds(shape: Shape, num_rows: int) -> float:
    """Median time of cuBLAS in bfloat16, with separate kernels for norm, activation and residual sum."""
    copies = max(2, min(_MAX_COPIES, round(_ROTATED_BYTES / (2 * shape.num_weights))))
    weights = [random_numbers(shape.num_weight_rows, shape.size) for _ in range(copies)]
    x, norm_weight = random_numbers(num_rows, shape.size), random_numbers(shape.size)
    residual = random_numbers(num_rows, shape.num_columns) if shape.adds else None

    def run(weight: Tensor) -> Tensor:
        out = linear(rms_norm(x, norm_weight, EPS) if shape.has_norm else x, weight)
        if shape.activation is not None:
            out = gated_activation(out, shape.activation)
        return out if residual is None else residual.add_(out)

    return microseconds(run, weights)


def microseconds(call: Callable[[Any], object], weights: Sequence[Any], num_replays: int = 9) -> float:
    """Median microseconds of a call in a CUDA graph that makes one call for each weight."""
    call(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(weight)
    times = []
    for _ in range(num_replays + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:]) * 1e3 / len(weights)
