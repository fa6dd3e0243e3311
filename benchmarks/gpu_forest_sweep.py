"""Compare tilings of the kernels for shared prefixes on this GPU.

    python benchmarks/gpu_forest_sweep.py

For each large workload of gpu_forest.py, and for one with longer leaves, times tilings for nodes with many
queries, then tilings for the leaves with the best tiling for nodes. Compares each result with the flat
kernel's. Prints the fastest tilings.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from gpu_forest import check, make_batch, octavo_forest, seconds_per_layer
from support.forest_workloads import GOALS, HEAD_DIM, Workload

from octavo.attention.tilings.hopper import DECODE_SHAPE, FEW_LEAVES_SHAPE, LEAF_SHAPE, NODE_SHAPE
from octavo.attention.tilings.portable import TileShape, decode_shape, prefill_shape

GROWING = (Workload("256 x (4096 + 256) 16/8", ((1, 4096), (256, 256)), 16, 8),)


def node_tilings() -> Iterator[tuple[str, TileShape | None, int]]:
    """Yield (name, tiling, shortest segment) to try for nodes with many queries; None: what is in use."""
    base = prefill_shape(2, HEAD_DIM, torch.bfloat16)
    shapes = (
        None,
        NODE_SHAPE,
        replace(base, rows=128, num_warps=8, num_stages=2, programs_per_multiprocessor=2, max_registers=128),
        replace(base, rows=128, num_warps=8, num_stages=3, programs_per_multiprocessor=1, max_registers=None),
        replace(base, rows=64, num_warps=4, num_stages=2, programs_per_multiprocessor=2, max_registers=None),
        replace(base, rows=64, num_warps=4, num_stages=3, programs_per_multiprocessor=2, max_registers=None),
        replace(base, rows=64, num_warps=4, num_stages=2, programs_per_multiprocessor=3, max_registers=168),
    )
    for shape, segment in product(shapes, (128, 256, 512, 1024)):
        name = "in use" if shape is None else _describe(shape)
        yield f"{name}, segments from {segment}", shape, segment


def leaf_tilings() -> Iterator[tuple[str, TileShape]]:
    """Yield (name, tiling) to try for the sequences' own parts; first those of the Hopper kernel."""
    for shape in (LEAF_SHAPE, FEW_LEAVES_SHAPE, DECODE_SHAPE):
        yield f"Hopper, {_describe(shape)}", shape
    base = decode_shape(2, HEAD_DIM, torch.bfloat16)
    yield _describe(base), base
    for stages, (programs, registers) in product((2, 3), ((2, None), (3, 168), (4, 128))):
        shape = replace(
            base, num_stages=stages, programs_per_multiprocessor=programs, max_registers=registers
        )
        yield _describe(shape), shape


def _describe(shape: TileShape) -> str:
    return (
        f"{shape.rows} rows, {shape.keys} keys, {shape.num_warps} warps, {shape.num_stages} stages, "
        f"{shape.programs_per_multiprocessor} programs, {shape.max_registers} registers"
    )


def main() -> None:
    """Try tilings for nodes, then, with the best of them, tilings for leaves; print the best of each."""
    for workload in (*GOALS, *GROWING):
        batch = make_batch(workload)
        nodes = []
        for name, shape, segment in node_tilings():
            attend = octavo_forest(batch, fat=shape, min_segment_tokens=segment)
            check(batch, attend)
            nodes.append((seconds_per_layer(batch, attend) * 1e6, name, shape, segment))
        nodes.sort(key=lambda entry: entry[0])
        _, _, shape, segment = nodes[0]
        leaves = []
        for name, leaf in leaf_tilings():
            attend = octavo_forest(batch, leaf, fat=shape, min_segment_tokens=segment)
            check(batch, attend)
            leaves.append((seconds_per_layer(batch, attend) * 1e6, name))
        print(f"{workload.name}")
        for us, name, *_ in nodes[:6]:
            print(f"  nodes  {us:6.1f} us  {name}")
        for us, name in sorted(leaves):
            print(f"  leaves {us:6.1f} us  {name}", flush=True)


if __name__ == "__main__":
    main()
