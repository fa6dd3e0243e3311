"""Probe: launches stream_kernel."""

from dataclasses import dataclass

import torch
from triton.experimental.gluon import language as gl

from octavo.gpu.launch import launch, overlap_options
from octavo.layers.linear.grouped.medium import add_parts
from octavo.layers.linear.grouped.operands import check_product
from octavo.layers.linear.grouped.stream_kernel import Shape, stream_kernel


@dataclass(frozen=True, slots=True)
class StreamTiling:
    columns: int
    num_warps: int
    num_stages: int
    programs: int
    turns: int = 0  # 0: all of K in one part
    max_registers: int | None = None
    mode: int = 0


def shape_of(weight, rows, tiling, norm, bias, activation, adds, overlap):
    spans = weight.words.shape[1] // 32
    turns = tiling.turns or -(-spans // tiling.num_warps)
    parts = -(-spans // (turns * tiling.num_warps))
    fused = (norm, bias, activation, adds) if parts == 1 else (norm, False, None, False)
    return Shape(
        weight.group,
        weight.size,
        1 if rows == 1 else 8 if rows <= 8 else 16,
        tiling.columns,
        tiling.num_warps,
        tiling.num_stages,
        turns,
        parts,
        *fused,
        overlap,
        tiling.mode,
        rows > 1 or tiling.turns > 0,
    )


def stream_linear(x, weight, bias=None, *, norm_weight=None, eps=0.0, activation=None, residual=None, tiling):
    out = check_product(x, weight, bias, activation, residual)
    num_rows, (num_weight_rows, size) = x.shape[0], weight.shape
    overlap = overlap_options(x)["OVERLAP"]
    shape = shape_of(
        weight,
        num_rows,
        tiling,
        norm_weight is not None,
        bias is not None,
        activation,
        residual is not None,
        overlap,
    )
    halves = 1 if shape.activation is None else 2
    num_tiles = -(-num_weight_rows // tiling.columns)
    tiles = -(-num_tiles // max(1, tiling.programs // shape.parts))
    parts = out.unsqueeze(0)
    if shape.parts > 1:
        parts = x.new_empty(shape.parts, num_rows, num_weight_rows, dtype=torch.float32)
    options = {} if tiling.max_registers is None else {"maxnreg": tiling.max_registers}
    launch(
        stream_kernel,
        (-(-num_tiles // tiles), shape.parts),
        *(x, weight.words, weight.pairs, x if bias is None else bias),
        *(x if norm_weight is None else norm_weight, parts),
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
        launch_pdl=overlap,
        **options,
    )
    if shape.parts > 1:
        add_parts(parts, bias, out, activation, adds=residual is not None)
    return out
