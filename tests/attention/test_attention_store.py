"""store_kv: which slots are written, and what is refused."""

import pytest
import torch
from attention_cases import KERNELS

from octavo.attention import AttentionMetadata, KVCache, LayerCache, paged_attention, store_kv
from octavo.errors import InvalidArgumentError

pytestmark = pytest.mark.parametrize("impl", KERNELS)


def new_cache(num_blocks=6, block_size=4, kv_heads=3, head_dim=20, dtype=torch.float32):
    cache = KVCache.allocate(
        num_layers=2,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    cache.data.fill_(torch.nan)
    return cache


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_writes_exactly_its_slots(impl, slot_dtype):
    """Strided views of a fused qkv, in any order; slot -1 writes nothing, nor does the other layer change."""
    cache = new_cache()
    k_cache, v_cache = cache.layer(1).k, cache.layer(1).v
    fused = torch.randn(5, 9, 20)
    k, v = fused[:, 3:6], fused[:, 6:]
    slots = torch.tensor([23, -1, 0, 7, -1], dtype=slot_dtype)
    store_kv(k, v, cache.layer(1), slots, impl=impl)
    for token, slot in [(0, 23), (2, 0), (3, 7)]:
        assert torch.equal(k_cache[slot // 4, slot % 4], k[token])
        assert torch.equal(v_cache[slot // 4, slot % 4], v[token])
    assert int((~cache.data.isnan()).sum()) == 3 * 2 * 3 * 20
    assert cache.layer(0).k.isnan().all()


def test_padding_only(impl):
    cache = new_cache()
    store_kv(*torch.randn(2, 4, 3, 20), cache.layer(0), torch.full((4,), -1), impl=impl)
    assert cache.data.isnan().all()


def test_no_tokens(impl):
    cache = new_cache()
    store_kv(*torch.randn(2, 0, 3, 20), cache.layer(0), torch.zeros(0, dtype=torch.int64), impl=impl)
    assert cache.data.isnan().all()


@pytest.mark.parametrize("head_dim", [1, 5, 80, 96])
def test_row_width_need_not_be_a_power_of_two(impl, head_dim):
    cache = new_cache(head_dim=head_dim)
    k, v = torch.randn(2, 24, 3, head_dim)
    store_kv(k, v, cache.layer(0), torch.arange(24), impl=impl)
    k_cache, v_cache = cache.layer(0).k, cache.layer(0).v
    assert torch.equal(k_cache.reshape(24, 3, head_dim), k)
    assert torch.equal(v_cache.reshape(24, 3, head_dim), v)


@pytest.mark.parametrize("slot", [24, -2, 1 << 40])
def test_a_slot_that_does_not_exist_is_refused_and_nothing_is_written(impl, slot):
    """Clamping it would overwrite another sequence's token."""
    cache = new_cache()
    with pytest.raises(InvalidArgumentError, match=rf"slot_mapping\[1\] is {slot}; slots go from 0 to 23"):
        store_kv(*torch.randn(2, 2, 3, 20), cache.layer(0), torch.tensor([3, slot]), impl=impl)
    assert cache.data.isnan().all()


def test_a_layer_larger_than_two_to_the_31_elements(impl, tmp_path):
    """int32 address arithmetic would wrap. The cache is a sparse file: two pages of it exist."""
    num_blocks = (1 << 31) // (16 * 64) + 2
    elements = torch.from_file(str(tmp_path / "cache"), shared=True, size=num_blocks * 16 * 64)
    cache = elements.view(num_blocks, 16, 1, 64)
    k = torch.randn(1, 1, 64)
    store_kv(k, k, LayerCache(cache, cache), torch.tensor([(num_blocks - 1) * 16]), impl=impl)
    assert torch.equal(cache[-1, 0], k[0])
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([1], dtype=torch.int32),
        positions=torch.tensor([0], dtype=torch.int32),
        slot_mapping=torch.tensor([-1]),
        block_table=torch.tensor([[num_blocks - 1]], dtype=torch.int32),
        max_query_len=1,
        max_seq_len=1,
    )
    out = paged_attention(torch.randn(1, 2, 64), LayerCache(cache, cache), metadata, scale=1.0, impl=impl)
    torch.testing.assert_close(out, k.expand(1, 2, 64))
