"""Compiles the Gluon kernels for a Hopper GPU, without one; prints their registers and memory as JSON.

A process of its own: where Triton's interpreter is switched on, its compiler is not to be had.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import triton
import triton.language as tl
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from octavo.attention.hopper import tma_decode as hopper_decode
from octavo.attention.hopper import tma_prefill as hopper_prefill
from octavo.attention.hopper.decode_runs import Run
from octavo.attention.hopper.pipe import Places
from octavo.attention.hopper.prefill_queries import Gather
from octavo.attention.tilings.hopper import (
    BESIDE_SHAPE,
    DECODE_SHAPE,
    FEW_LEAVES_SHAPE,
    LEAF_SHAPE,
    NODE_SHAPE,
    PROMPT_SHAPE,
    SHORT_SHAPE,
    WIDE_DECODE_SHAPE,
    WIDE_SHAPE,
    WIDEST_DECODE_SHAPE,
    WIDEST_SHAPE,
)
from octavo.attention.triton.kernel_call import Cache, Queries, Score, Shape

# Compute capability: 90 for Hopper. Gluon's kernels are for Hopper only.
CAPABILITY = int(os.environ.get("COMPILED_CAPABILITY", "90"))
HEAD_DIM, GROUP, KV_HEADS = 128, 2, 8
SCORE = Score("fp32", 0, 0.0, None, None, None)
# An integer that Triton knows nothing about; others are multiples of 16.
VARYING = "i32 that varies"
CACHE = Cache("*bf16", *["i32"] * 3, "*bf16", *["i32"] * 3, "*i32", VARYING)
PLACES = Places("i32", "i32", 0)


def compile_kernel(kernel, arguments, source_of=GluonASTSource, **options):
    """{registers, stack, shared} of a kernel; arguments are types, or constants."""
    return figures_of(compiled_kernel(kernel, arguments, source_of, **options))


def compiled_kernel(kernel, arguments, source_of=GluonASTSource, **options):
    """What Triton makes of a kernel; arguments are types, or constants."""
    signature, constants, facts = {}, {}, {}

    def describe(value, path):
        if isinstance(value, tuple):
            items = [describe(item, (*path, i)) for i, item in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if value == VARYING:
            return "i32"
        if isinstance(value, str):
            if value != "fp32" and not value.startswith("tensordesc"):
                # As Triton finds it in the arguments that most callers give.
                facts[path] = [["tt.divisibility", 16]]
            return value
        constants[path] = value
        return "constexpr"

    for i, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=True)):
        signature[name] = describe(value, (i,))
    source = source_of(kernel, signature, constants, facts)
    return triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)


def figures_of(compiled):
    """{registers, stack, shared} of a compiled kernel."""
    usage = inspect_cubin(compiled, "cuobjdump", "-res-usage")
    registers, stack = re.search(r"REG:(\d+).*?STACK:(\d+)", usage).groups()
    if int(stack) == 0:
        # ptxas 12.8 sometimes takes the stack's register for a number that is not there yet.
        code = code_of(compiled)
        assert len(re.findall(r"\bR1\b", code)) <= 1, (
            "an instruction reads a register that nothing has written"
        )
    return {"registers": int(registers), "stack": int(stack), "shared": compiled.metadata.shared}


@cache
def inspect_cubin(compiled, tool, *options):
    """What a tool that comes with Triton prints about a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [Path(nvidia.__file__).parent / "bin" / tool, *options, cubin.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def code_of(compiled):
    """A compiled kernel's machine code; without the analysis that would only name targets of branches."""
    return inspect_cubin(compiled, "nvdisasm", "-c", "-ndf")


def count_spills(code):
    """How many instructions of machine code read or write what does not fit into registers."""
    return len(re.findall(r"\b(?:LDL|STL)\b", code))


def descriptor(kind, itemsize, box, swizzle_bytes=128):
    """The type of a tensor descriptor, as hopper.descriptor makes it."""
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle_bytes, element_bitwidth=8 * itemsize, rank=len(box)
    )
    return f"tensordesc<{kind}{box},{layout!r}>"


def matrix(keys, block_size):
    """A cache's matrix as caches.py describes it."""
    part = [math.gcd(keys, block_size), 64]
    layout = gl.NVMMASharedLayout.get_default_for(part, gl.bfloat16)
    return f"tensordesc<bf16{part},{layout!r}>"


def shape_of(tile, block_size, *, begins=False, windowed=False):
    dims = {WIDE_SHAPE: 256, WIDE_DECODE_SHAPE: 256, WIDEST_SHAPE: 512, WIDEST_DECODE_SHAPE: 512}
    head_dim = dims.get(tile, HEAD_DIM)
    sizes = (GROUP, KV_HEADS, head_dim, head_dim, block_size, tile.rows, tile.keys)
    flags = [windowed, *[False] * 4]
    values = (head_dim, head_dim, begins)
    return Shape(*(tl.constexpr(value) for value in (*sizes, *flags, *values)))


def queries(results):
    return Queries("*bf16", "i32", "i32", "*i32", results, "*fp32")


def compile_decode(tile, block_size=128, **options):
    """Of leaves, which write float32, or of a step without nodes."""
    is_leaf = tile in (LEAF_SHAPE, FEW_LEAVES_SHAPE)
    score = SCORE._replace(window="i32" if options.get("windowed") else 0)
    matrices = [matrix(tile.keys, block_size)] * 2
    run = Run("*i32", "*i32", "*i32", "*fp32", "*fp32")
    arguments = [
        *(queries("*fp32"), CACHE, *matrices, PLACES, score, run),
        *(
            "*i32",
            "i32",
            "i32",
            shape_of(tile, block_size, **options),
            GROUP,
            tile.num_stages,
            False,
            True,
            is_leaf,
            not is_leaf,
        ),
    ]
    options = {"num_warps": 1, "maxnreg": tile.max_registers, "launch_pdl": True}
    return compile_kernel(hopper_decode._attend_decode_kernel, arguments, **options)


def compile_nodes(tile, gather, block_size=128, **options):
    """Of nodes, or of prompts if nothing is gathered."""
    score = SCORE._replace(window="i32" if options.get("windowed") else 0)
    matrices = [matrix(tile.keys, block_size)] * 2
    arguments = [
        *(queries("*fp32" if gather else "*bf16"), gather, "*i32", VARYING, *matrices),
        *(
            PLACES,
            score,
            "*i32",
            "*i32",
            shape_of(tile, block_size, **options),
            tile.keys,
            tile.num_stages,
            tile.rows == 64,
        ),
    ]
    options = {"num_warps": 4, "maxnreg": tile.max_registers, "launch_pdl": gather is not None}
    return compile_kernel(hopper_prefill._attend_kernel, arguments, **options)


def figures() -> dict[str, dict[str, int]]:
    """Of each kernel."""
    gather = Gather("*i32", "*i32", "i32")
    return {
        "decode": compile_decode(DECODE_SHAPE),
        "leaves": compile_decode(LEAF_SHAPE),
        "few leaves": compile_decode(FEW_LEAVES_SHAPE),
        "nodes beside": compile_nodes(BESIDE_SHAPE, gather),
        "nodes": compile_nodes(NODE_SHAPE, gather),
        "prompts": compile_nodes(PROMPT_SHAPE, None),
        "short prompts": compile_nodes(SHORT_SHAPE, None),
        "prompts beside nodes": compile_nodes(NODE_SHAPE, None),
        "prompts, short blocks": compile_nodes(PROMPT_SHAPE, None, 16),
        "nodes, short blocks": compile_nodes(NODE_SHAPE, gather, 16),
        "nodes beside, short blocks": compile_nodes(BESIDE_SHAPE, gather, 16),
        "decode, short blocks": compile_decode(DECODE_SHAPE, 16),
        "decode from a first key": compile_decode(DECODE_SHAPE, begins=True),
        "prompts from a first key": compile_nodes(PROMPT_SHAPE, None, begins=True),
        "decode, window": compile_decode(DECODE_SHAPE, windowed=True),
        "leaves, window": compile_decode(LEAF_SHAPE, windowed=True),
        "few leaves, window": compile_decode(FEW_LEAVES_SHAPE, windowed=True),
        "nodes, window": compile_nodes(NODE_SHAPE, gather, windowed=True),
        "nodes beside, window": compile_nodes(BESIDE_SHAPE, gather, windowed=True),
        "prompts, window": compile_nodes(PROMPT_SHAPE, None, windowed=True),
        "decode, wide": compile_decode(WIDE_DECODE_SHAPE),
        "decode, wide, short blocks": compile_decode(WIDE_DECODE_SHAPE, 16, windowed=True),
        "decode, widest": compile_decode(WIDEST_DECODE_SHAPE),
        "prompts, wide": compile_nodes(WIDE_SHAPE, None),
        "prompts, wide, window": compile_nodes(WIDE_SHAPE, None, windowed=True),
        "nodes, wide, short blocks": compile_nodes(WIDE_SHAPE, gather, 16),
        "prompts, widest": compile_nodes(WIDEST_SHAPE, None, windowed=True, begins=True),
        "nodes, widest, short blocks": compile_nodes(WIDEST_SHAPE, gather, 16),
    }


def main() -> None:
    json.dump(figures(), sys.stdout)


if __name__ == "__main__":
    main()
