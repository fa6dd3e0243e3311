"""Compiles the portable attention kernels for heads of 512, as JSON: {kernel: {registers, stack, shared}}.

COMPILED_CAPABILITY says for which GPU; 89 stands for those with 99 KiB of shared memory.
"""

import json
import sys

import torch
from compile_hopper import CACHE, CAPABILITY
from compile_portable import (
    PAIRS,
    PLAIN,
    QUERIES,
    compile_alone,
    compile_attention,
    compile_by_name,
    shape_of,
)

from octavo.attention.tilings import portable
from octavo.attention.triton import nodes

DIM = 512
SHARED_BYTES = (227 if CAPABILITY >= 90 else 99) * 1024


def compile_nodes(cache):
    """The kernel for shared nodes with many query tokens."""
    is_float8 = cache is PAIRS
    tile = portable.node_shape(8, DIM, torch.float16 if is_float8 else torch.bfloat16)
    arguments = {
        "queries": QUERIES._replace(out="*fp32"),
        "cache": cache._replace(table_row=1),
        "score": PLAIN,
        **dict.fromkeys(("units", "count", "tokens", "partial_ids"), "*i32"),
        "num_rows": "i32",
        "shape": shape_of(tile, dims=(DIM, DIM), block_size=64, group=8, packed=is_float8),
        "OVERLAPS": CAPABILITY >= 90,
    }
    return compile_by_name(nodes._attend_nodes_kernel, arguments, tile)


def compile_merge():
    """The kernel that merges what nodes and leaves return."""
    tensors = ("lse_ptr", "leaf_out", "leaf_lse", "partial_out", "partial_lse")
    arguments = {"out_ptr": "*bf16", **dict.fromkeys(tensors, "*fp32"), "merge_begin": "*i32"}
    sizes = {"NUM_HEADS": 32, "HEAD_DIM": DIM, "HEADS": 2, "PADDED_DIM": DIM, "OVERLAPS": CAPABILITY >= 90}
    return compile_by_name(nodes._merge_kernel, {**arguments, **sizes}, portable.TileShape(16, 16, 1, 3, 1))


def main() -> None:
    portable.shared_bytes = lambda device: SHARED_BYTES
    found = {"merge": compile_merge()}
    for name, cache in (("bfloat16", CACHE), ("float8", PAIRS)):
        shape = {"cache": cache, "dims": (DIM, DIM), "block_size": 64, "packed": cache is PAIRS}
        found[f"nodes, {name}"] = compile_nodes(cache)
        found[f"alone, {name}"] = compile_alone(
            sequences=16, group=8, value_eps="fp32", keys_are_values=True, **shape
        )
        for group in (8, 32):
            for kernel, used in compile_attention(group=group, **shape).items():
                found[f"{kernel} of {group}, {name}"] = used
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
