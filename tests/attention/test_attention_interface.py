"""What callers may pass, what they are told otherwise, and how an implementation is chosen."""

from dataclasses import replace

import pytest
import torch
from attention_cases import KERNELS, make_case

import octavo.attention
from octavo.attention import (
    AttentionMetadata,
    ForestPlan,
    KVCache,
    LayerCache,
    available_impls,
    paged_attention,
    paged_attention_with_lse,
    store_kv,
)
from octavo.errors import ConfigError, InvalidArgumentError


def test_all_names_exist():
    assert octavo.attention.__all__ == sorted(octavo.attention.__all__)
    assert all(hasattr(octavo.attention, name) for name in octavo.attention.__all__)


def test_auto_prefers_the_compiled_kernel_for_float32_on_a_cpu():
    case = make_case([90, 20], [1, 20])
    assert next(iter(available_impls("cpu", torch.float32))) == "c"
    reasons = available_impls("cpu", torch.float32)
    assert list(reasons) == ["c", "triton", "torch", "reference"]
    assert reasons["c"] is reasons["torch"] is reasons["reference"] is None
    assert torch.equal(case.run("auto")[0], case.run("c")[0])


def test_auto_takes_torch_for_other_dtypes_and_says_why():
    case = make_case([90, 20], [1, 20], dtype=torch.bfloat16)
    assert torch.equal(case.run("auto")[0], case.run("torch")[0])
    assert available_impls("cpu", torch.bfloat16)["c"] == (
        "the compiled kernels take float32, over a cache in float32 or bfloat16; "
        "got torch.bfloat16 over a cache in torch.bfloat16"
    )
    assert available_impls("cuda", torch.float32)["c"] == (
        "the compiled kernels run on CPUs, the tensors are on cuda"
    )


def test_an_impl_asked_for_by_name_never_falls_back():
    case = make_case([9], [1], dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="cannot run: the compiled kernels take float32"):
        case.run("c")
    with pytest.raises(ConfigError, match="did you mean 'torch'"):
        case.run("torhc")


def call(case, **changes):
    caches = {name: changes.pop(name, getattr(case, name)) for name in ("k_cache", "v_cache")}
    arguments = {"q": case.q, "cache": LayerCache(*caches.values()), "metadata": case.metadata}
    return paged_attention(**{**arguments, "scale": 1.0, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(3, 3, 16)}, r"q must be \[T, H, 16\] with H a multiple of the cache's 2 kv heads"),
        ({"q": torch.zeros(3, 4, 8)}, r"q must be \[T, H, 16\]"),
        ({"q": torch.zeros(3, 4, 16).double()}, "q must have the cache's dtype"),
        ({"q": torch.zeros(3, 16, 4).mT}, "last dimension of q must be contiguous"),
        ({"q": torch.zeros(3, 4, 16, device="meta")}, "q is on meta"),
        ({"v_cache": torch.zeros(2, 16, 2, 8)}, "of one shape and dtype"),
        ({"k_cache": torch.zeros(16, 2, 16)}, "of one shape and dtype"),
        ({"cache": torch.zeros(16, 2, 16)}, "must be a LayerCache, such as KVCache.layer.* got Tensor"),
        ({"window": 0}, "window must be at least 1"),
        ({"softcap": -1.0}, "softcap must be"),
        ({"softcap": float("nan")}, "softcap must be"),
        ({"alibi_slopes": torch.zeros(2)}, r"alibi_slopes must be \[4\] float32"),
        ({"sinks": torch.zeros(2)}, r"sinks must be \[4\]"),
        ({"sinks": torch.zeros(4).int()}, r"sinks must be \[4\], a floating number"),
        ({"alibi_slopes": torch.zeros(4).double()}, r"alibi_slopes must be \[4\] float32"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    with pytest.raises(InvalidArgumentError, match=message):
        call(make_case([20, 9], [2, 1]), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"block_table": torch.zeros(1, 4, dtype=torch.int32)},
            r"block_table must be \[2, max_blocks\] int32",
        ),
        (
            {"block_table": torch.zeros(2, 4, dtype=torch.int64)},
            r"block_table must be \[2, max_blocks\] int32",
        ),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, "end within the 2 query tokens of positions"),
        (
            {"positions": torch.zeros(4, dtype=torch.int32)},
            r"positions must be \[3\] int32, one per row of q",
        ),
        ({"positions": torch.zeros(3)}, r"positions must be \[T\] int32; got \[3\] torch.float32"),
        ({"seq_lens": torch.zeros(2)}, r"seq_lens must be \[S\] int32 or int64; got \[2\] torch.float32"),
        ({"cu_seqlens_q": torch.zeros(1, 3).int()}, r"cu_seqlens_q must be \[S \+ 1\] int32 or int64"),
        ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)}, "cu_seqlens_q must have 3 entries"),
        ({"keys_are_old": True}, "keys_are_old is for a single query token of each sequence, got 2"),
        ({"max_seq_len": 200}, "a sequence of 200 tokens does not fit the block table's 4 columns"),
        ({"seq_lens": torch.tensor([20, 200])}, "a sequence of 200 tokens does not fit"),
    ],
)
@pytest.mark.parametrize("impl", ["torch", "c"])
def test_wrong_metadata_is_refused(impl, changes, message):
    case = make_case([20, 9], [2, 1])
    with pytest.raises(InvalidArgumentError, match=message):
        call(case, metadata=replace(case.metadata, **changes), impl=impl)


@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [([20], [3]), ([20, 9], [2, 2]), ([20, 200], [2, 1]), ([19, 9], [2, 1]), ([20, 9], [1, 2])],
)
def test_a_plan_of_another_step_is_refused(seq_lens, query_lens):
    """Also that of the step before, by which the newest key would be left out."""
    case = make_case([20, 9], [2, 1])
    plan = make_case(seq_lens, query_lens).forest()
    with pytest.raises(InvalidArgumentError, match="the plan is of another step"):
        case.run("c", plan)


@pytest.mark.parametrize("impl", ["torch", "c"])
@pytest.mark.parametrize("block_id", [-1, 5, 1 << 30])
def test_a_block_that_does_not_exist_is_refused(impl, block_id):
    """-1 padding or garbage within a sequence's length must not reach address arithmetic."""
    case = make_case([40], [1])
    assert case.k_cache.shape[0] == 5
    case.metadata.block_table[0, 1] = block_id
    with pytest.raises(InvalidArgumentError, match="names a block outside"):
        case.run(impl)


@pytest.mark.parametrize(
    ("k", "slots", "message"),
    [
        (torch.zeros(3, 2, 8), torch.zeros(3, dtype=torch.int64), r"k must be \[T, KH, D\] = \[3, 2, 16\]"),
        (torch.zeros(3, 2, 16), torch.zeros(2, dtype=torch.int64), r"k must be \[T, KH, D\] = \[2, 2, 16\]"),
        (torch.zeros(3, 2, 16).half(), torch.zeros(3, dtype=torch.int64), "k must have the cache's dtype"),
        (torch.zeros(3, 2, 16), torch.zeros(3), "slot_mapping must be int32 or int64"),
        (torch.zeros(3, 2, 16), torch.zeros(3, 1, dtype=torch.int64), "k must be"),
    ],
)
def test_wrong_store_arguments_are_refused(k, slots, message):
    case = make_case([20], [1])
    with pytest.raises(InvalidArgumentError, match=message):
        store_kv(k, k, case.cache, slots)


def test_nothing_is_stored_where_tokens_share_memory():
    case, k = make_case([20], [1]), torch.zeros(1, 2, 16)
    cache = replace(case.cache, v=case.cache.v[:1].expand(case.cache.v.shape[0], -1, -1, -1))
    with pytest.raises(InvalidArgumentError, match="v_cache is expanded"):
        store_kv(k, k, cache, torch.tensor([1]))


@pytest.mark.parametrize("impl", KERNELS)
def test_the_room_works_alone(impl):
    """Store token by token across block edges, attend over the cache: equals dense causal attention.

    Softmax per block without merging, or reading the dense inputs instead of the cache, would fail.
    """
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 11, 2, 8, generator=generator)
    cache = KVCache.allocate(num_layers=1, num_blocks=5, block_size=4, num_kv_heads=2, head_dim=8)
    cache.data.fill_(torch.nan)
    layer = cache.layer(0)
    blocks = torch.tensor([[3, 0, 4]], dtype=torch.int32)
    outs = []
    for p in range(11):
        metadata = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([p + 1], dtype=torch.int32),
            positions=torch.tensor([p], dtype=torch.int32),
            slot_mapping=blocks[0, p // 4] * 4 + torch.tensor([p % 4]),
            block_table=blocks,
            max_query_len=1,
            max_seq_len=p + 1,
            work=ForestPlan.from_block_tables(blocks.numpy(), [p + 1], [0, 1], 4),
        )
        now = slice(p, p + 1)
        store_kv(k[now], v[now], layer, metadata.slot_mapping, impl=impl)
        k[now], v[now] = torch.nan, torch.nan
        outs.append(paged_attention_with_lse(q[now], layer, metadata, scale=8**-0.5, impl=impl)[0])
    k, v = torch.randn(3, 11, 2, 8, generator=torch.Generator().manual_seed(1))[1:]
    dense = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
    )
    torch.testing.assert_close(torch.cat(outs), dense.transpose(0, 1))
