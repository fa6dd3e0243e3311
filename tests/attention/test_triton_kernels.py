"""The Triton kernels against the reference and float64: every shape, option and edge of the layout."""

from dataclasses import replace

import pytest
import torch
from triton_cases import DEVICE, assert_close, check, make_case, poisoned_memory, run, to_device

from octavo.attention import KVCache, gpu_paged
from octavo.attention.score_options import ScoreOptions
from octavo.errors import InvalidArgumentError


@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 256])
def test_decodes_lengths_at_block_edges(block_size):
    """The trap of t % block_size == 0: lengths B - 1, B, B + 1, 2B, beside a single token."""
    b = min(block_size, 96)
    check([max(b - 1, 1), b, b + 1, 2 * b, 1], [1] * 5, block_size=block_size)


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_prefills_and_extends_lengths_at_block_edges(block_size):
    lens = [block_size + 20, 2 * block_size, 2 * block_size + 1, 64, 65]
    check(lens, [20, 2 * block_size, 1, 64, 40], block_size=block_size, heads=8, kv_heads=2)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256, 512])
def test_any_head_dim(head_dim):
    """The trap of power-of-two-only rows."""
    check([70, 33, 17], [1, 20, 17], head_dim=head_dim)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (9, 3), (12, 2), (20, 1)])
def test_any_number_of_heads_per_kv_head(heads, kv_heads):
    check([70, 33, 40], [1, 9, 40], heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (32, 1), (8, 4)])
@pytest.mark.parametrize(("head_dim", "window"), [(512, None), (256, 20)])
def test_wide_heads(heads, kv_heads, head_dim, window):
    check([90, 33, 40], [1, 9, 40], heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window)


@pytest.mark.parametrize("window", [1, 7, 64, 200])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [4, 30, 100]])
def test_window(window, query_lens):
    check([150, 33, 100], query_lens, window=window, heads=8, kv_heads=2)


def test_reads_no_block_behind_the_window():
    """Blocks that have slid out of the window may be freed: their table entries may be anything."""
    case = make_case([150, 100], [1, 40], block_size=16)
    expected = run(case, window=20)
    case.metadata.block_table[0, :8] = 1 << 30
    case.metadata.block_table[1, :2] = -1
    assert all(torch.equal(a, b) for a, b in zip(run(case, window=20), expected, strict=True))


@pytest.mark.parametrize("query_lens", [[1, 1], [3, 60]])
def test_sinks(query_lens):
    sinks = torch.tensor([0.5, -3.0, 4.0, -torch.inf])
    check([70, 100], query_lens, sinks=sinks)
    check([70, 100], query_lens, sinks=sinks, window=3, dtype=torch.float16)


@pytest.mark.parametrize("query_lens", [[1, 1], [3, 60]])
def test_softcap_and_alibi(query_lens):
    slopes = torch.tensor([0.5, 0.25, 0.02, 0.1])
    check([70, 100], query_lens, softcap=2.0)
    check([70, 100], query_lens, alibi_slopes=slopes)
    check([70, 100], query_lens, softcap=5.0, alibi_slopes=slopes, window=40, scale=0.7)


def test_rows_that_see_nothing_are_zero_with_lse_minus_infinity():
    """Dead rows of a padded batch (seq_len 0), one query token or many, beside live ones."""
    case = make_case([0, 40, 0, 70], [1, 1, 50, 60])
    out, lse = run(case)
    dead = torch.tensor([0, *range(2, 52)])
    assert torch.equal(out[dead], torch.zeros_like(out[dead]))
    assert torch.equal(lse[dead], torch.full_like(lse[dead], -torch.inf))
    assert lse[1].isfinite().all()
    assert lse[52:].isfinite().all()


def test_tokens_that_no_sequence_covers_are_zero_with_lse_minus_infinity():
    """A padded batch's rows beyond cu_seqlens_q[-1], and sequences without query tokens."""
    case = make_case([40, 30, 20], [1, 0, 2])
    q = torch.cat([case.q, torch.full_like(case.q, torch.nan)])
    positions = torch.cat([case.metadata.positions, torch.full((3,), 1 << 30, dtype=torch.int32)])
    padded = replace(case, q=q, metadata=replace(case.metadata, positions=positions))
    out, lse = run(padded)
    expected_out, expected_lse = run(case)
    assert torch.equal(out, torch.cat([expected_out, torch.zeros_like(expected_out)]))
    assert torch.equal(lse, torch.cat([expected_lse, torch.full_like(expected_lse, -torch.inf)]))


def test_no_tokens_at_all():
    case = make_case([20, 30], [0, 0])
    out, lse = run(case)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)


def test_strided_queries_and_both_cache_layouts():
    """q as a view of a fused qkv; blocks as [N, B, KH, D] in memory as well as [N, KH, B, D]."""
    case = make_case([70, 40, 90], [1, 3, 60])
    expected = run(case)
    fused = torch.randn(64, 3, 4, 16)
    fused[:, 1] = case.q
    token_major = replace(case, k_cache=case.k_cache.contiguous(), v_cache=case.v_cache.contiguous())
    for other in (replace(case, q=fused[:, 1]), token_major):
        assert all(torch.equal(a, b) for a, b in zip(run(other), expected, strict=True))


def test_positions_decide_what_a_token_sees():
    """Positions out of order, as in a tree of drafted tokens; and one past the end, which sees all."""
    case = make_case([50, 80], [4, 60])
    case.metadata.positions[:4] = torch.tensor([48, 47, 47, 99])
    case.metadata.positions[4:] = case.metadata.positions[4:].flip(0)
    out, lse = run(case)
    exact_out, exact_lse = case.oracle()
    assert (out - exact_out).abs().max() < 1e-5
    assert (lse - exact_lse).abs().max() < 1e-5


def test_one_step_map_serves_many_layers():
    """The map's arrival counters are as before after each call, whoever merged last."""
    moved = to_device(make_case([500, 3, 260], [1, 1, 1]))
    options = ScoreOptions(0.25)
    step_map = gpu_paged.make_step_map(moved.q, moved.cache, moved.metadata)
    results = [
        gpu_paged.attend_with_map(moved.q, moved.cache, moved.metadata, options, step_map) for _ in range(3)
    ]
    assert not step_map.decode.arrivals.any()
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_parts_of_a_step_with_room_for_many_more_sequences(monkeypatch):
    """Units without tokens, as padded steps have, and rows of tiles that do not exist: the same bits."""
    monkeypatch.setattr("octavo.attention.tilings.step_tiles.num_multiprocessors", lambda device: 4)
    room = [0] * 24
    case = make_case([600, 300], [9, 70])
    padded = make_case([600, 300, *room], [9, 70, *room])
    assert torch.equal(padded.q, case.q)
    moved = to_device(padded)
    fat = gpu_paged.make_step_map(moved.q, moved.cache, moved.metadata).prefill
    assert fat.num_parts > 1
    assert int(fat.count) < fat.units.shape[0] < 24
    results = run(case)
    assert_close(case, results)
    assert all(torch.equal(a, b) for a, b in zip(run(padded), results, strict=True))


def test_refuses_a_map_for_another_window_and_a_scale_that_is_not_positive():
    moved = to_device(make_case([20], [1]))
    arguments = (moved.q, moved.cache, moved.metadata)
    step_map = gpu_paged.make_step_map(moved.q, moved.cache, moved.metadata, 8)
    with pytest.raises(InvalidArgumentError, match="map is for window 8"):
        gpu_paged.attend_with_map(*arguments, ScoreOptions(1.0), step_map)
    with pytest.raises(InvalidArgumentError, match="positive scale"):
        gpu_paged.paged_attention_with_lse(*arguments, ScoreOptions(-1.0))


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("block_size", "kv_heads", "head_dim"), [(4, 3, 20), (1, 1, 128), (64, 8, 64)])
def test_store_writes_exactly_its_slots(slot_dtype, block_size, kv_heads, head_dim):
    """Strided views of a fused qkv; slot -1 writes nothing, nor does the other layer change."""
    sizes = {"block_size": block_size, "num_kv_heads": kv_heads, "head_dim": head_dim}
    cache = KVCache.allocate(num_layers=2, num_blocks=24, device=DEVICE, **sizes)
    cache.data.fill_(torch.nan)
    layer = cache.layer(1)
    k_cache, v_cache = layer.k, layer.v
    fused = torch.randn(5, 3 * kv_heads, head_dim, device=DEVICE)
    k, v = fused[:, kv_heads : 2 * kv_heads], fused[:, 2 * kv_heads :]
    slots = torch.tensor([23, -1, 0, 7, -1], dtype=slot_dtype, device=DEVICE)
    with poisoned_memory():
        gpu_paged.store_kv(k, v, layer, slots)
        gpu_paged.store_kv(k[:0], v[:0], layer, slots[:0])
    for token, slot in [(0, 23), (2, 0), (3, 7)]:
        assert torch.equal(k_cache[slot // block_size, slot % block_size], k[token])
        assert torch.equal(v_cache[slot // block_size, slot % block_size], v[token])
    assert int((~cache.data.isnan()).sum()) == 3 * 2 * kv_heads * head_dim
    assert cache.layer(0).k.isnan().all()
