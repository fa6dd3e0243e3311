"""All layers in one call: what they are one by one, for any rows, threads, head norms, biases and windows."""

from dataclasses import replace

import pytest
import torch

from octavo.attention import AttentionMetadata, ForestPlan, KVCache
from octavo.errors import InvalidArgumentError
from octavo.forms.blocks import BLOCK, BlockWeight
from octavo.gemm.cpu.block_linear import BlockLinear, tiled
from octavo.gemm.cpu.library import compile_failure
from octavo.layers import (
    AttentionLayer,
    BlockInput,
    BlockOutput,
    FeedForward,
    HeadRMSNorm,
    LayerOptions,
    RMSNorm,
)
from octavo.layers.compiled_stack import LayerStack
from octavo.layers.rotary import Rotary
from octavo.layers.stack import make_stack
from octavo.layers.steps.cpu_step import CpuStep, run_layers
from octavo.parallel import TensorParallel

pytestmark = pytest.mark.skipif(compile_failure() is not None, reason="needs a C compiler")

HIDDEN, INNER, HEADS, KV_HEADS, DIM, NUM_LAYERS = 64, 96, 4, 2, 16, 3
BLOCK_SIZE = 4
OPTIONS = LayerOptions(layer=0, rope=0, scale=0.25, window=None, softcap=0.0, qk_norm=None)
ROPE = Rotary(torch.rand(DIM // 2), 1.0)
GROWING = Rotary(torch.rand(DIM // 2), 1.0, growth=(0.7, 4))


def linear(sizes: list[int], columns: int, *, has_bias: bool = False) -> BlockLinear:
    """Weights above one another, the first in 4 bits with minimums, the next in 8."""
    weights = []
    for index, rows in enumerate(sizes):
        scales = torch.rand(rows, columns // BLOCK) * 0.02
        quants = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
        if index == 0:
            weights.append(BlockWeight(4, quants, scales, -7.5 * scales))
        else:
            weights.append(BlockWeight(8, (quants - 8).view(torch.int8), scales.half(), None))
    return BlockLinear(tiled(weights), torch.randn(sum(sizes)) if has_bias else None)


def new_layer(index: int, *, has_bias: bool = False, has_head_norm: bool = False, **options):
    norms = [RMSNorm(torch.rand(HIDDEN) + 0.5, 1e-5) for _ in range(2)]
    head_norm = HeadRMSNorm(torch.rand(HEADS + KV_HEADS, DIM) + 0.5, 1e-6) if has_head_norm else None
    qkv = linear([HEADS * DIM, 2 * KV_HEADS * DIM], HIDDEN, has_bias=has_bias)
    attention = AttentionLayer(
        qkv_proj=BlockInput(norms[0], qkv),
        o_proj=BlockOutput(linear([HIDDEN], HEADS * DIM, has_bias=has_bias), None, TensorParallel()),
        options=replace(OPTIONS, layer=index, qk_norm=head_norm, **options),
    )
    feed_forward = FeedForward(
        BlockInput(norms[1], linear([2 * INNER], HIDDEN), "silu"),
        BlockOutput(linear([HIDDEN], INNER), None, TensorParallel()),
    )
    return attention, feed_forward


def new_layers(**settings) -> list[tuple[AttentionLayer, FeedForward]]:
    torch.manual_seed(0)
    return [new_layer(index, **settings) for index in range(NUM_LAYERS)]


def new_cache() -> KVCache:
    cache = KVCache.allocate(
        num_layers=NUM_LAYERS, num_blocks=16, block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_dim=DIM
    )
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(1)))
    return cache


def new_metadata(query_lens: list[int], num_cached: int = 9) -> AttentionMetadata:
    """Sequences with `num_cached` keys each, in blocks of their own, and some new tokens."""
    num_blocks = -(-(num_cached + max(query_lens)) // BLOCK_SIZE)
    table = torch.arange(len(query_lens) * num_blocks, dtype=torch.int32).view(len(query_lens), -1)
    positions = [torch.arange(num_cached, num_cached + length) for length in query_lens]
    slots = [
        row[each // BLOCK_SIZE] * BLOCK_SIZE + each % BLOCK_SIZE
        for row, each in zip(table, positions, strict=True)
    ]
    lens = torch.tensor(query_lens, dtype=torch.int32)
    return AttentionMetadata(
        cu_seqlens_q=torch.cat((lens.new_zeros(1), lens.cumsum(0, dtype=torch.int32))),
        seq_lens=lens + num_cached,
        positions=torch.cat(positions).int(),
        slot_mapping=torch.cat(slots).long(),
        block_table=table,
        max_query_len=max(query_lens),
        max_seq_len=num_cached + max(query_lens),
    )


def run(layers, hidden: torch.Tensor, metadata: AttentionMetadata, *, stack: LayerStack | None):
    """Run all layers, in one call or one by one; return the residual stream and the cache."""
    cache, hidden = new_cache(), hidden.clone()
    step = CpuStep(cache, metadata, num_heads=HEADS)
    rotations = [step.rotations(rope, metadata.positions) for rope in (ROPE, GROWING)]
    if stack is not None:
        run_layers([step], cache, stack, hidden, rotations)
        return hidden, cache.data
    delta = None
    for attention, feed_forward in layers:
        delta = feed_forward(hidden, attention(hidden, delta, rotations, step))
    assert delta is not None
    return hidden.add_(delta), cache.data


@pytest.mark.parametrize(
    "settings",
    [{}, {"has_bias": True}, {"window": 5}, {"softcap": 2.0, "scale": 1.0}, {"rope": 1}],
    ids=str,
)
@pytest.mark.parametrize("query_lens", [[1], [1, 1, 1], [11, 2]], ids=str)
def test_it_is_the_layers_one_by_one(settings: dict, query_lens: list[int]) -> None:
    layers, metadata = new_layers(**settings), new_metadata(query_lens)
    hidden = torch.randn(sum(query_lens), HIDDEN)
    expected = run(layers, hidden, metadata, stack=None)
    actual = run(layers, hidden, metadata, stack=make_stack(layers))
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def test_norms_of_heads() -> None:
    layers, metadata, hidden = new_layers(has_head_norm=True), new_metadata([3, 1]), torch.randn(4, HIDDEN)
    expected = run(layers, hidden, metadata, stack=None)
    actual = run(layers, hidden, metadata, stack=make_stack(layers))
    for one, other in zip(actual, expected, strict=True):
        # An activation near the middle of two 8-bit steps may be rounded to either.
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_neither_neighbours_nor_threads_change_a_bit() -> None:
    layers, hidden = new_layers(), torch.randn(9, HIDDEN)
    stack = make_stack(layers)
    together, _ = run(layers, hidden, new_metadata([1] * 9, num_cached=3), stack=stack)
    num_threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            alone, _ = run(layers, hidden[:1], new_metadata([1], num_cached=3), stack=stack)
            assert torch.equal(alone, together[:1])
    finally:
        torch.set_num_threads(num_threads)


def test_layers_that_c_does_not_know_are_called_one_by_one() -> None:
    attention, feed_forward = new_layers()[0]
    normed = replace(attention, o_proj=replace(attention.o_proj, norm=RMSNorm(torch.ones(HIDDEN), 1e-5)))
    gelu = replace(feed_forward, gate_up_proj=replace(feed_forward.gate_up_proj, activation="gelu"))
    assert make_stack([(attention, feed_forward)]) is not None
    assert make_stack([(attention, feed_forward), (normed, feed_forward)]) is None
    assert make_stack([(attention, gelu)]) is None


def test_a_plan_for_a_window_is_for_layers_that_see_no_more() -> None:
    query_lens, message = [11, 2], "the plan is for window=5, this call has window="
    metadata, hidden = new_metadata(query_lens), torch.randn(13, HIDDEN)
    lengths = metadata.seq_lens.numpy(), metadata.cu_seqlens_q.numpy()
    planned = replace(metadata, work=ForestPlan.flat(*lengths, window=5))
    for window in (None, 6, 5, 3):
        layers = new_layers(window=window)
        for stack in (make_stack(layers), None):
            if window in (3, 5):
                actual, expected = (run(layers, hidden, step, stack=stack) for step in (planned, metadata))
                torch.testing.assert_close(actual, expected)
                continue
            with pytest.raises(InvalidArgumentError, match=f"{message}{window}; make one"):
                run(layers, hidden, planned, stack=stack)


def test_what_does_not_exist_is_named() -> None:
    layers, hidden, metadata = new_layers(), torch.randn(1, HIDDEN), new_metadata([1])
    stack = make_stack(layers)
    with pytest.raises(InvalidArgumentError, match=r"slot_mapping\[0\] is 64; slots go from 0 to 63"):
        run(layers, hidden, replace(metadata, slot_mapping=torch.tensor([64])), stack=stack)
    table = torch.full_like(metadata.block_table, 16)
    with pytest.raises(InvalidArgumentError, match=r"block_table\[0, 0\] names a block outside 0..15"):
        run(layers, hidden, replace(metadata, block_table=table), stack=stack)
    with pytest.raises(InvalidArgumentError, match=r"softcap and window not negative; got 0.25, -1.0"):
        run(layers, hidden, metadata, stack=make_stack(new_layers(softcap=-1.0)))
