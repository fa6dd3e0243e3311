"""Random calls of the compiled layers; see kernel_fuzz.py."""

from dataclasses import replace

import torch
from attention_cases import make_case, with_bfloat16_cache
from fuzz_helpers import close, slots_of

from octavo.attention import KVCache
from octavo.forms.blocks import BlockWeight
from octavo.forms.float8 import FLOAT8, Float8Weight
from octavo.forms.mxfp4 import Mxfp4Weight
from octavo.gemm.cpu.block_linear import BlockLinear, TiledBlocks, tiled
from octavo.gemm.cpu.compiled_norm import compiled_layers
from octavo.gemm.cpu.compiled_rows import CompiledFewRows, rows_in_bfloat16
from octavo.gemm.expert_choice import Choice
from octavo.layers import AttentionLayer, BlockInput, BlockOutput, FeedForward, RMSNorm
from octavo.layers.experts import ListedExperts
from octavo.layers.layer_options import LayerOptions
from octavo.layers.rotary import Rotary
from octavo.layers.stack import make_stack
from octavo.layers.steps.cpu_step import CpuStep, run_layers
from octavo.models.formats.gguf.gguf_blocks import blocks_of, quantised_of, read_as_stored
from octavo.parallel import TensorParallel


def check_layers(pick):
    """The fused small layers beside torch's operators."""
    layers = compiled_layers()
    assert layers is not None
    rows, size = pick.randint(0, 5), pick.choice((1, 7, 16, 33, 100))
    hidden, delta, weight = torch.randn(rows, size), torch.randn(rows, size), torch.randn(size)
    total = hidden + delta
    normed = layers.add_rms_norm(hidden, delta, weight, 1e-5)
    assert torch.equal(hidden, total)
    close(normed, total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight)
    assert torch.equal(layers.add_rms_norm(total, None, weight, 1e-5), normed)
    gate_up = torch.randn(rows, 2 * size) * 40
    gate, up = gate_up.split(size, dim=1)
    close(layers.silu_and_multiply(gate_up), torch.nn.functional.silu(gate) * up, scale=40.0)


def check_bfloat16(pick):
    """The product with a weight in bfloat16 beside torch's in float32; a row's bits are its own."""
    rows, outputs, columns = pick.randint(0, 14), pick.randint(4, 30), pick.randint(1, 70)
    weight, x = torch.randn(outputs, columns).bfloat16(), torch.randn(rows, columns)
    bias = torch.randn(outputs) if pick.random() < 0.5 else None
    layer = CompiledFewRows.from_bfloat16(weight, bias)
    got = layer(x)
    close(got, torch.nn.functional.linear(x, weight.float(), bias), scale=10.0)
    for row in range(rows):
        assert torch.equal(got[row : row + 1], layer(x[row : row + 1]))


def check_float8(pick):
    """The product with a weight in float8 beside torch's on its numbers, for tiles of any size."""
    rows, outputs, columns = pick.randint(0, 14), pick.randint(4, 30), pick.randint(1, 200)
    height, width = pick.choice(((1, columns), (outputs, columns), (128, 128), (3, 64)))
    scales = torch.rand(-(-outputs // height), -(-columns // width))
    weight = Float8Weight(torch.randn(outputs, columns).to(FLOAT8), scales, height, width)
    x, bias = torch.randn(rows, columns), torch.randn(outputs) if pick.random() < 0.5 else None
    start = pick.randrange(outputs)
    stop = pick.randint(start + 1, outputs)
    rounded = weight.dequantise()[start:stop].bfloat16()
    assert torch.equal(rows_in_bfloat16(weight, start, stop), rounded)
    layer = CompiledFewRows.from_float8(weight, bias)
    got = layer(x)
    close(got, torch.nn.functional.linear(x, weight.dequantise(), bias), scale=10.0)
    for row in range(rows):
        assert torch.equal(got[row : row + 1], layer(x[row : row + 1]))


def random_mxfp4(outputs, columns):
    """A weight of any numbers, of exponents that float32 holds products with."""
    values = torch.randint(256, (outputs, columns // 2), dtype=torch.uint8)
    return Mxfp4Weight(values, torch.randint(110, 130, (outputs, columns // 32), dtype=torch.uint8))


def check_mxfp4(pick):
    """The product with an MXFP4 weight beside torch's on its numbers; stored as in a file, the same bits."""
    rows, outputs, columns = pick.randint(0, 9), pick.randint(1, 40), 32 * pick.randint(1, 6)
    weight, x = random_mxfp4(outputs, columns), torch.randint(-127, 128, (rows, columns)).float()
    x[:, ::32] = 127
    got = BlockLinear(tiled([weight]))(x)
    expected = torch.nn.functional.linear(x.double(), weight.dequantise().double()).float()
    close(got, expected, scale=float(expected.abs().max()) if rows else 1.0)
    stored = torch.randint(250, (outputs, columns // 32, 17), dtype=torch.uint8)
    as_stored, unpacked = read_as_stored("MXFP4", stored), quantised_of("MXFP4", stored)
    assert torch.equal(TiledBlocks(as_stored).quants, TiledBlocks(unpacked).quants)


def check_experts(pick):
    """Experts by one call beside their layers one by one, some of them elsewhere."""
    number, k, tokens = pick.randint(1, 6), pick.randint(1, 4), pick.randint(0, 20)
    hidden, inner = 32 * pick.randint(1, 3), 32 * pick.randint(1, 3)
    make = pick.choice((random_linear, lambda _, *sizes: BlockLinear(tiled([random_mxfp4(*sizes)]))))
    layers = [
        [make(pick, outputs, columns) for _ in range(number)]
        for outputs, columns in ((2 * inner, hidden), (hidden, inner))
    ]
    experts = ListedExperts(*layers, pick.choice(("silu", "clamped_swiglu")))
    chosen = torch.randint(0, number + pick.randint(0, 1), (tokens, k), dtype=torch.int32)
    choice, x = Choice(chosen, torch.rand(tokens, k)), torch.randn(tokens, hidden)
    expected = experts.by_expert(x, choice)
    close(experts(x, choice), expected, scale=float(expected.abs().max()) if tokens else 1.0)
    added = torch.ones_like(x)
    close(experts(x, choice, added), expected + 1, scale=float(expected.abs().max()) + 1 if tokens else 1.0)


def check_blocks(pick):
    """The product with weights in blocks of every form, beside torch's on the numbers that they stand for."""
    bits, halves = pick.choice(((4, 1), (8, 1), (8, 2)))
    rows, outputs, columns = pick.randint(0, 9), pick.randint(1, 40), 32 * pick.randint(1, 6)
    low, high, kind = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    dtype = torch.float32 if halves == 2 else pick.choice((torch.float16, torch.float32))
    scales = torch.randn(outputs, columns // 32 * halves).to(dtype)
    mins = torch.randn(outputs, columns // 32).to(dtype) if halves == 1 and pick.random() < 0.5 else None
    weight = BlockWeight(bits, torch.randint(low, high, (outputs, columns), dtype=kind), scales, mins)
    # Whole numbers to 127, and one of that size in each block: nothing is rounded.
    x = torch.randint(-127, 128, (rows, columns)).float()
    x[:, ::32] = 127
    bias = torch.randn(outputs) if pick.random() < 0.5 else None
    expected = torch.nn.functional.linear(
        x.double(), weight.dequantise().double(), None if bias is None else bias.double()
    )
    close(BlockLinear(tiled([weight]), bias)(x), expected.float(), scale=1e4)


def check_tiles(pick):
    """Blocks of a file in the kernel's order: as PyTorch orders them."""
    name, block_bytes = pick.choice((("Q4_1", 20), ("Q8_0", 34)))
    rows, shape = pick.randint(1, 20), (pick.randint(1, 5), block_bytes)
    # No float16 of such bytes is infinite.
    stored, num_rows = torch.randint(0, 60, (rows, *shape), dtype=torch.uint8), rows + pick.randint(0, 9)
    weights = read_as_stored(name, stored), blocks_of(name, stored)
    tiles, expected = (
        TiledBlocks(weight, num_rows=num_rows).rows(torch.arange(num_rows)) for weight in weights
    )
    assert torch.equal(tiles, expected)


def random_linear(pick, outputs, columns):
    """A layer of one weight in blocks."""
    bits, low, high, kind = pick.choice(((4, 0, 16, torch.uint8), (8, -128, 128, torch.int8)))
    scales = torch.randn(outputs, columns // 32) / columns
    quants = torch.randint(low, high, (outputs, columns), dtype=kind)
    return BlockLinear(tiled([BlockWeight(bits, quants, scales, None)]))


def check_stack(pick):
    """All layers of a decoder in one call: what they are one by one."""
    heads, kv_heads = pick.choice(((2, 1), (4, 2), (6, 6)))
    head_dim, hidden, inner = pick.choice((16, 48, 512)), 32 * pick.randint(1, 3), 32 * pick.randint(1, 3)
    seq_lens = [pick.randint(1, 50) for _ in range(pick.randint(1, 4))]
    query_lens = [pick.randint(1, n) for n in seq_lens]
    case = make_case(seq_lens, query_lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    if pick.random() < 0.4:
        case = with_bfloat16_cache(case)
    metadata = replace(case.metadata, slot_mapping=slots_of(case), work=case.forest())
    options = LayerOptions(0, 0, 0.3, pick.choice((None, 8)), pick.choice((0.0, 4.0)), None)
    qkv = random_linear(pick, (heads + 2 * kv_heads) * head_dim, hidden)
    output = BlockOutput(random_linear(pick, hidden, heads * head_dim), None, TensorParallel())
    attention = AttentionLayer(BlockInput(RMSNorm(torch.rand(hidden), 1e-5), qkv), output, options)
    gate_up = BlockInput(RMSNorm(torch.rand(hidden), 1e-5), random_linear(pick, 2 * inner, hidden), "silu")
    down = BlockOutput(random_linear(pick, hidden, inner), None, TensorParallel())
    feed_forward, stream = FeedForward(gate_up, down), torch.randn(case.q.shape[0], hidden)
    rope, outs = Rotary(torch.rand(head_dim // 2), 1.0), []
    for stack in (None, make_stack([(attention, feed_forward)])):
        cache = KVCache(torch.stack([case.k_cache, case.v_cache]).transpose(2, 3)[None].contiguous())
        step, out = CpuStep(cache, metadata, num_heads=heads), stream.clone()
        rotations = [step.rotations(rope, metadata.positions)]
        if stack is None:
            out += feed_forward(out, attention(out, None, rotations, step))
        else:
            run_layers([step], cache, stack, out, rotations)
        outs.append((out, cache.data))
    for one, other in zip(*outs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
