"""A decoder step on the compiled kernels: what it takes, and what it is told to be wrong by name."""

from dataclasses import replace

import pytest
import torch

from octavo.attention import AttentionMetadata, KVCache
from octavo.errors import InvalidArgumentError
from octavo.layers.layer_options import LayerOptions
from octavo.layers.steps.cpu_step import CpuStep

NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 4, 2, 1, 8
OPTIONS = LayerOptions(layer=0, rope=0, scale=0.3, window=None, softcap=0.0, qk_norm=None)


def new_cache():
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "head_dim": HEAD_DIM}
    cache = KVCache.allocate(num_layers=1, num_kv_heads=NUM_KV_HEADS, **sizes)
    cache.data.zero_()
    return cache


def new_metadata(**changes):
    """One sequence of 10 tokens in blocks 5, 0 and 2; the last two tokens are new."""
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32),
        seq_lens=torch.tensor([10], dtype=torch.int32),
        positions=torch.tensor([8, 9], dtype=torch.int32),
        slot_mapping=torch.tensor([8, 9]),
        block_table=torch.tensor([[5, 0, 2, -1]], dtype=torch.int32),
        max_query_len=2,
        max_seq_len=10,
    )
    return replace(metadata, **changes)


def attend(metadata, options=OPTIONS, cache=None, num_heads=NUM_HEADS):
    step = CpuStep(cache or new_cache(), metadata, num_heads=num_heads)
    width = (num_heads + 2 * NUM_KV_HEADS) * HEAD_DIM
    rotations = torch.ones(2, 1, HEAD_DIM // 2, dtype=torch.complex64)
    return step.attend(torch.ones(2, width), rotations, options)


def test_a_step_writes_its_slots_and_attends():
    cache = new_cache()
    out = attend(new_metadata(), cache=cache)
    assert int(cache.data.sum()) == 2 * 2 * HEAD_DIM
    # Keys of 0 beside own keys of 1: weights 1 and exp(0.3 * 8).
    weight = torch.tensor(0.3 * HEAD_DIM).exp()
    expected = torch.stack([weight / (8 + weight), 2 * weight / (8 + 2 * weight)])
    torch.testing.assert_close(out, expected[:, None].expand(2, NUM_HEADS * HEAD_DIM))


def test_sinks_take_their_share_of_the_weights():
    sinks = torch.tensor([2.0, -torch.inf])
    out = attend(new_metadata(), replace(OPTIONS, sinks=sinks)).view(2, NUM_HEADS, HEAD_DIM)
    weight = torch.tensor(0.3 * HEAD_DIM).exp()
    for head, sink in enumerate(sinks.exp()):
        expected = torch.stack([weight / (8 + weight + sink), 2 * weight / (8 + 2 * weight + sink)])
        torch.testing.assert_close(out[:, head], expected[:, None].expand(2, HEAD_DIM))


@pytest.mark.parametrize("block_id", [-1, NUM_BLOCKS, NUM_BLOCKS * BLOCK_SIZE - 1, 2**31 - 1])
def test_a_block_that_does_not_exist_is_named_with_the_blocks_that_do(block_id):
    """With the number of blocks as the bound, not that of slots."""
    table = torch.tensor([[5, block_id, 2, -1]], dtype=torch.int32)
    message = rf"block_table\[0, 1\] names a block outside 0..5 within the sequence's length: {block_id};"
    with pytest.raises(InvalidArgumentError, match=message):
        attend(new_metadata(block_table=table))


@pytest.mark.parametrize("slot", [-2, NUM_BLOCKS * BLOCK_SIZE])
def test_a_slot_that_does_not_exist_is_named_with_the_slots_that_do(slot):
    with pytest.raises(InvalidArgumentError, match=rf"slot_mapping\[1\] is {slot}; slots go from 0 to 23"):
        attend(new_metadata(slot_mapping=torch.tensor([8, slot])))


@pytest.mark.parametrize("slots", [[8], [8, 9, 10], [[8, 9]]])
def test_there_is_a_slot_for_each_token(slots):
    with pytest.raises(InvalidArgumentError, match=r"slot_mapping must be \[2\], one slot per position"):
        attend(new_metadata(slot_mapping=torch.tensor(slots)))


@pytest.mark.parametrize(
    "changes",
    [{"scale": float("nan")}, {"scale": 1e39}, {"softcap": float("inf")}, {"softcap": -1.0}, {"window": -1}],
)
def test_scores_that_have_no_result_are_refused(changes):
    with pytest.raises(InvalidArgumentError, match="scale and softcap must be finite float32 numbers"):
        attend(new_metadata(), replace(OPTIONS, **changes))


def test_kv_heads_divide_the_heads():
    cache = KVCache.allocate(num_layers=1, num_blocks=6, block_size=4, num_kv_heads=2, head_dim=8)
    step = CpuStep(cache, new_metadata(), num_heads=3)
    with pytest.raises(
        InvalidArgumentError, match="a multiple of the kv heads as query heads; got 4, 2, 8 and 3"
    ):
        step.attend(torch.ones(2, 7 * 8), torch.ones(2, 1, 4, dtype=torch.complex64), OPTIONS)
