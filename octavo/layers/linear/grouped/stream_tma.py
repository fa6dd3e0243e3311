"""Probe: launches stream_tma_kernel."""

from dataclasses import dataclass

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.gpu.launch import launch
from octavo.layers.linear.grouped.medium import add_parts
from octavo.layers.linear.grouped.operands import check_product
from octavo.layers.linear.grouped.stream_tma_kernel import Shape, stream_tma_kernel


@dataclass(frozen=True, slots=True)
class TmaTiling:
    each: int
    num_warps: int
    num_stages: int
    programs: int
    max_registers: int
    turns: int = 0
    mode: int = 0


def shape_of(weight, rows, tiling, norm, bias, activation, adds):
    spans = weight.words.shape[1] // 32
    turns = tiling.turns or -(-spans // tiling.num_warps)
    parts = -(-spans // (turns * tiling.num_warps))
    fused = (norm, bias, activation, adds) if parts == 1 else (norm, False, None, False)
    return Shape(
        weight.group,
        weight.size,
        1 if rows == 1 else 8 if rows <= 8 else 16,
        2 if fused[2] else tiling.each,
        tiling.num_warps,
        tiling.num_stages,
        turns,
        parts,
        *fused,
        tiling.mode,
    )


def describe(tensor, box, swizzle):
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=32, rank=len(box))
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, layout)


def stream_tma(x, weight, *, norm_weight=None, eps=0.0, activation=None, residual=None, tiling):
    out = check_product(x, weight, None, activation, residual)
    num_rows, (num_weight_rows, size) = x.shape[0], weight.shape
    shape = shape_of(
        weight, num_rows, tiling, norm_weight is not None, False, activation, residual is not None
    )
    own = 16 if shape.activation else 16 * shape.each
    num_tiles = -(-(num_weight_rows // (2 if shape.activation else 1)) // own)
    tiles = -(-num_tiles // max(1, tiling.programs // shape.parts))
    parts = out.unsqueeze(0)
    if shape.parts > 1:
        parts = x.new_empty(shape.parts, num_rows, num_weight_rows, dtype=torch.float32)
    words = weight.words.view(num_weight_rows, -1, 32).transpose(0, 1)
    pairs = weight.pairs.view(-1, 256 // weight.group, num_weight_rows).transpose(0, 1)
    launch(
        stream_tma_kernel,
        (-(-num_tiles // tiles), shape.parts),
        describe(words, [tiling.num_warps, 16, 32], 128),
        describe(pairs, [1, tiling.num_warps, 16], 64),
        *(x, x, x if norm_weight is None else norm_weight, parts),
        *(
            num_rows,
            num_weight_rows,
            x.stride(0),
            parts.stride(1),
            parts.stride(0),
            tiles,
            weight.factor,
            eps,
        ),
        Shape(*map(gl.constexpr, shape)),
        num_warps=tiling.num_warps,
        launch_pdl=True,
        maxnreg=tiling.max_registers,
    )
    if shape.parts > 1:
        add_parts(parts, None, out, activation, adds=residual is not None)
    return out
