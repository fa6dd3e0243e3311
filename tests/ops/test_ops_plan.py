"""A plan of what sequences share changes no result, or is refused."""

import numpy as np
import pytest
import torch

from octavo.attention import DeviceForest, ForestPlan
from octavo.errors import InvalidArgumentError
from octavo.ops import flash_attn_with_kvcache

FLOAT8 = torch.float8_e4m3fn
SLOPES, SCALES = torch.rand(4), torch.rand(3, 2) + 0.5
# Three sequences of 70, 84 and 90 tokens share 64, or four blocks.
TABLE = np.array([[0, 1, 2, 3, 4, -1], [0, 1, 2, 3, 5, 6], [0, 1, 2, 3, 7, 8]], dtype=np.int32)
LENGTHS = np.array([70, 84, 90], dtype=np.int32)


def call(dtype=torch.float32, cache_dtype=None, **options):
    """A call of two queries each, and its plan."""
    generator = torch.Generator().manual_seed(0)
    caches = (torch.randn(9, 16, 2, 16, generator=generator).to(cache_dtype or dtype) for _ in "kv")
    q = torch.randn(3, 2, 4, 16, generator=generator).to(dtype)
    right = options.get("window_size", (-1, -1))[1]
    right = 0 if options.get("causal") else None if right < 0 else right
    plan = ForestPlan.from_block_tables(TABLE, LENGTHS, np.arange(4, dtype=np.int32) * 2, 16, right=right)
    assert plan.sharing.num_nodes > 0
    places = {"cache_seqlens": torch.from_numpy(LENGTHS), "block_table": torch.from_numpy(TABLE)}
    return (q, *caches), places | options, plan


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {},
        {"window_size": (40, 1)},
        {"window_size": (70, -1), "softcap": 2.0},
        {"causal": True, "alibi_slopes": SLOPES, "s_aux": SLOPES},
        {"causal": True, "dtype": torch.bfloat16},
        {"causal": True, "cache_dtype": FLOAT8},
    ],
    ids=lambda options: "-".join(options) or "all",
)
def test_a_plan_changes_no_result(options):
    tensors, given, plan = call(**options)
    alone = flash_attn_with_kvcache(*tensors, **given, return_softmax_lse=True)
    shared = flash_attn_with_kvcache(*tensors, **given, plan=plan, return_softmax_lse=True)
    torch.testing.assert_close(shared, alone)


@pytest.mark.parametrize(
    "options",
    [
        {"alibi_slopes": SLOPES.expand(3, 4)},
        {"cache_dtype": FLOAT8, "k_descale": SCALES},
        {"cache_dtype": FLOAT8, "q_descale": SCALES},
        {"cache_dtype": FLOAT8, "v_descale": SCALES},
    ],
    ids="-".join,
)
def test_keys_that_sequences_share_mean_the_same_to_all(options):
    tensors, given, plan = call(causal=True, **options)
    with pytest.raises(InvalidArgumentError, match=r"need the same alibi_slopes \[H\], k_scale and v_scale"):
        flash_attn_with_kvcache(*tensors, **given, plan=plan)


def test_a_plan_for_another_mask_is_refused():
    tensors, given, plan = call(causal=True)
    with pytest.raises(InvalidArgumentError, match="the plan is for right=0, this call has right=None"):
        flash_attn_with_kvcache(*tensors, **given | {"causal": False}, plan=plan)


NEW = (torch.randn(3, 2, 2, 16), torch.randn(3, 2, 2, 16))
BEFORE = {"cache_seqlens": torch.from_numpy(LENGTHS - 2)}


def test_a_plan_for_the_lengths_after_new_keys_changes_no_result():
    tensors, given, plan = call(causal=True)
    caches = [tensor.clone() for tensor in tensors[1:]]
    alone = flash_attn_with_kvcache(*tensors, *NEW, **given | BEFORE)
    torch.testing.assert_close(
        flash_attn_with_kvcache(tensors[0], *caches, *NEW, **given | BEFORE, plan=plan), alone
    )
    assert torch.equal(torch.stack(caches), torch.stack(tensors[1:]))


def test_a_forest_for_gpus_is_refused_before_keys_are_appended():
    tensors, given, _ = call(causal=True)
    before = [tensor.clone() for tensor in tensors[1:]]
    forest = DeviceForest(
        max_num_seqs=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        block_size=16,
        dtype=torch.float32,
        device="cpu",
    )
    with pytest.raises(InvalidArgumentError, match="a DeviceForest, which only the Triton kernels read"):
        flash_attn_with_kvcache(*tensors, *NEW, **given | BEFORE, plan=forest)
    assert all(torch.equal(cache, kept) for cache, kept in zip(tensors[1:], before, strict=True))


@pytest.mark.parametrize(
    ("options", "wrong", "message"),
    [
        ({}, {"cache_seqlens": torch.from_numpy(LENGTHS)}, "plan is of another step"),
        ({}, {"seqused_q": torch.tensor([1, 2, 2], dtype=torch.int32)}, "plan is of another step"),
        ({}, {"cache_leftpad": torch.zeros(3, dtype=torch.int32)}, "cannot share keys"),
        ({}, {"causal": False}, "the plan is for right=0"),
        ({"alibi_slopes": SLOPES.expand(3, 4)}, {}, "need the same alibi_slopes"),
        ({"cache_dtype": FLOAT8, "k_descale": SCALES}, {}, "need the same alibi_slopes"),
    ],
    ids=["lengths", "queries", "first keys", "mask", "slopes", "scales"],
)
def test_a_plan_is_refused_before_keys_are_appended(options, wrong, message):
    tensors, given, plan = call(causal=True, **options)
    before = [tensor.float() if tensor.dtype == FLOAT8 else tensor.clone() for tensor in tensors[1:]]
    with pytest.raises(InvalidArgumentError, match=message):
        flash_attn_with_kvcache(*tensors, *NEW, **given | BEFORE | wrong, plan=plan)
    for cache, kept in zip(tensors[1:], before, strict=True):
        assert torch.equal(cache.to(kept.dtype), kept)
