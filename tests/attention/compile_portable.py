"""Compiles variants of the Triton kernels that only calls from outside of an engine use, without a GPU.

Triton's interpreter does not check types, so a kernel that it runs may not compile. Prints their registers
and memory as JSON, beside those of compile_hopper.py and compile_append.py: to import all that is needed
takes as long as to compile one of the three.
"""

import json
import sys
from itertools import product

import compile_append
import compile_hopper
import torch
import triton.language as tl
from compile_hopper import CACHE, VARYING, compile_kernel
from triton.compiler import ASTSource

from octavo.attention.step import fused_decode
from octavo.attention.step.fused_token import Rotation
from octavo.attention.tilings.portable import (
    ONE_BLOCK,
    decode_shape,
    fused_shape,
    node_shape,
    padded_head_dim,
    prefill_shape,
)
from octavo.attention.triton import (
    nodes,
    paged_decode,
    paged_prefill,
    step_map,
    store,
    uniform_map,
    window_nodes,
)
from octavo.attention.triton.kernel_call import Queries, Score, Shape

GROUP, KV_HEADS = 4, 8
PAIRS = CACHE._replace(k="*i16", v="*i16")
QUERIES = Queries("*bf16", "i32", "i32", "*i32", "*bf16", "*fp32")
PLAIN = Score("fp32", 0, 0.0, None, None, None)


def shape_of(tile, *, dims=(128, 128), block_size=16, **flags):
    head_dim, value_dim = dims
    values = {
        "group": GROUP,
        "kv_heads": KV_HEADS,
        "head_dim": head_dim,
        "padded_dim": padded_head_dim(head_dim),
        "block_size": block_size,
        "rows": tile.rows,
        "keys": tile.keys,
        "value_dim": value_dim,
        "padded_value_dim": padded_head_dim(value_dim),
        **flags,
    }
    return Shape(*(tl.constexpr(values.get(name, False)) for name in Shape._fields))


def compile_by_name(kernel, arguments, tile=None):
    options = {} if tile is None else {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile is not None and tile.max_registers is not None:
        options["maxnreg"] = tile.max_registers
    values = [arguments.pop(name, None) for name in kernel.arg_names]
    assert not arguments, f"no arguments of {kernel}: {arguments}"
    return compile_kernel(kernel, values, ASTSource, **options)


def compile_attention(score=PLAIN, *, cache=CACHE, parts=1, group=GROUP, **shape):
    """The decode kernel and the prefill kernel."""
    shape["group"] = group
    dtype = torch.float8_e4m3fn if cache is PAIRS else torch.bfloat16
    dim = padded_head_dim(max(shape.get("dims", (128, 128))))
    thin = decode_shape(group, dim, dtype)
    fat = prefill_shape(group, dim, torch.float16 if cache is PAIRS else dtype)
    partials = {"units": "*i32", "partial_out": "*fp32", "partial_lse": "*fp32", "num_rows": "i32"}
    common = {"queries": QUERIES, "cache": cache, "score": score, **partials}
    runs = {"schedule": "*i32", "arrivals": "*i32", "cu_seqlens_q": "*i32", "num_sequences": "i32"}
    overlap = compile_hopper.CAPABILITY >= 90
    thin_arguments = {**common, **runs, "shape": shape_of(thin, **shape), "MERGED_ROWS": group}
    thin_arguments.update(OVERLAP=overlap, EARLY=False, KEYS_ARE_OLD=overlap)
    fat_arguments = {**common, "shape": shape_of(fat, **shape), "NUM_PARTS": parts}
    return {
        "decode": compile_by_name(paged_decode._attend_decode_kernel, thin_arguments, thin),
        "prefill": compile_by_name(paged_prefill._attend_prefill_kernel, fat_arguments, fat),
    }


def compile_nodes(score=PLAIN, *, cache=CACHE, thin=False, **shape):
    """Shared nodes."""
    dtype = torch.float8_e4m3fn if cache is PAIRS else torch.bfloat16
    dim = padded_head_dim(shape.get("dims", (128, 128))[0])
    tile = (
        decode_shape(GROUP, dim, dtype)
        if thin
        else node_shape(GROUP, dim, torch.float16 if cache is PAIRS else dtype)
    )
    results = QUERIES._replace(out="*fp32")
    tensors = dict.fromkeys(("units", "count", "tokens", "partial_ids"), "*i32")
    arguments = {"queries": results, "cache": cache, "score": score, **tensors, "num_rows": "i32"}
    arguments.update(shape=shape_of(tile, block_size=64, **shape), OVERLAPS=True)
    return compile_by_name(nodes._attend_nodes_kernel, arguments, tile)


def compile_seen(window):
    tensors = dict.fromkeys(("units", "count", "tokens", "positions"), "*i32")
    arguments = {**tensors, "num_rows": "i32", "window": window, "TOKENS": 32}
    return compile_by_name(window_nodes.see_nodes_kernel, arguments)


def compile_list(integers):
    sizes = dict.fromkeys(
        ("num_sequences", "num_units", "above_tokens", "max_tokens", "window", "shift"), "i32"
    )
    tensors = dict.fromkeys(("units", "count", "positions", "first_keys", "shifted"), "*i32")
    tiles = {"TILE_TOKENS": 8, "PADDED_TOKENS": 8, "PADDED_SEQUENCES": 64}
    lengths = {"cu_seqlens_q": integers, "seq_lens": integers}
    return compile_by_name(step_map.list_units_kernel, {**sizes, **tensors, **tiles, **lengths})


def compile_plan(integers, *, thin, begins):
    sizes = dict.fromkeys(("num_sequences", "query_len", "num_tiles", "shift", "window"), "i32")
    tensors = dict.fromkeys(("cu_seqlens_q", "positions", "units", "schedule", "arrivals", "count"), "*i32")
    tiles = {
        "KV_HEADS": 8,
        "TILE_TOKENS": 8,
        "KEYS": 32,
        "PADDED_SEQUENCES": 1024,
        "CHUNK": 256,
        "MOST_PIECES": 16,
    }
    lengths = {"seq_lens": integers, "first_keys": "*i32" if begins else None, "DECODE": thin}
    return compile_by_name(uniform_map._map_kernel, {**sizes, **tensors, **tiles, **lengths})


def compile_store():
    rows, blocks = store.Rows("*bf16", "i32", "i32"), store.Blocks("*bf16", *["i32"] * 3)
    sizes = {
        "NUM_HEADS": 8,
        "HEAD_DIM": 59,
        "VALUE_DIM": 40,
        "BLOCK_SIZE": 1025,
        "HEADS": 8,
        "PADDED_DIM": 64,
    }
    tensors = {"k": rows, "v": rows, "k_cache": blocks, "v_cache": blocks, "slot_mapping": "*i64"}
    return compile_by_name(store._store_kernel, {**tensors, **sizes})


def compile_alone(
    score=PLAIN, *, cache=CACHE, sinks=None, sequences=1, value_eps=None, keys_are_values=False, **shape
):
    """The kernel for a step's only token, or for a few."""
    dtype = torch.float8_e4m3fn if cache is PAIRS else torch.bfloat16
    tile = fused_shape(shape.get("group", GROUP), padded_head_dim(shape.get("dims", (128, 128))[0]), dtype)
    numbers = {
        "queries": QUERIES,
        "cache": cache,
        "score": score,
        "step": fused_decode.Step("*i32", "*i32", "*i64"),
        "rotation": Rotation("*fp32", "*fp32", "i32", "i32", "*fp32", "fp32", value_eps),
        "pieces": fused_decode.Pieces("*i32", "*fp32", "*fp32"),
        "sinks": sinks,
        "block_size": VARYING,
        "num_sequences": VARYING,
    }
    constants = {
        "SPLITS": 16,
        "SEQUENCES": sequences,
        "MERGED_ROWS": 4,
        "NORM": sinks is None,
        "KEYS_ARE_VALUES": keys_are_values,
        "OVERLAP": compile_hopper.CAPABILITY >= 90,
    }
    return compile_by_name(
        fused_decode._attend_fused_kernel, {**numbers, **constants, "shape": shape_of(tile, **shape)}, tile
    )


def figures() -> dict[str, dict[str, int]]:
    """Of each variant."""
    by_sequence = PLAIN._replace(slopes="*fp32", slopes_row="i32", shift="i32")
    scaled = PLAIN._replace(k_scale="*fp32", v_scale="*fp32", scales_row="i32")
    windowed = PLAIN._replace(window="i32")
    kinds = {
        "one block": compile_attention(block_size=ONE_BLOCK, begins=True),
        "window": compile_attention(windowed, windowed=True, begins=True, parts=3),
        "value dim": compile_attention(dims=(192, 128)),
        "wide values": compile_attention(dims=(1, 256), block_size=7),
        "slopes": compile_attention(by_sequence, biased=True, begins=True),
        "scales": compile_attention(scaled, cache=PAIRS, dims=(128, 64), scaled=True, packed=True),
    }
    found = {f"{name}, {kind}": used for kind, pair in kinds.items() for name, used in pair.items()}
    for dim in (64, 256):
        found[f"nodes, window, {dim}"] = compile_nodes(windowed, windowed=True, dims=(dim, dim))
    capped = windowed._replace(softcap="fp32", k_scale="*fp32", v_scale="*fp32")
    flags = {"windowed": True, "capped": True, "scaled": True, "packed": True, "thin": True}
    found["thin nodes, all options"] = compile_nodes(capped, cache=PAIRS, **flags)
    for window in ("i32", "i64"):
        found[f"seen nodes, {window}"] = compile_seen(window)
    found["store"] = compile_store()
    found["alone"] = compile_alone()
    found["alone, several"] = compile_alone(sequences=16)
    found["alone, one block"] = compile_alone(block_size=ONE_BLOCK)
    found["alone, window"] = compile_alone(windowed, windowed=True, dims=(64, 64), sinks="*bf16")
    found["alone, scales"] = compile_alone(
        PLAIN._replace(k_scale="*fp32", v_scale="*fp32"), cache=PAIRS, scaled=True, packed=True
    )
    found["alone, float8"] = compile_alone(cache=PAIRS, packed=True)
    for integers, begins in product(("*i32", "*i64"), (False, True)):
        found[f"list {integers}"] = compile_list(integers)
        for thin in (False, True):
            found[f"plan {integers} {begins} {thin}"] = compile_plan(integers, thin=thin, begins=begins)
    return found


def main() -> None:
    portable = {**figures(), **compile_append.figures()}
    json.dump({"hopper": compile_hopper.figures(), "portable": portable}, sys.stdout)


if __name__ == "__main__":
    main()
