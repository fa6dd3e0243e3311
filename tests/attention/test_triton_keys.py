"""The Triton kernels: which keys a token sees beyond the causal mask, and values, biases and splits."""

from dataclasses import replace

import pytest
import torch
from attention_cases import make_float8_case
from fewer import fewer
from triton_cases import DEVICE, assert_close, check, make_case, poisoned_memory, run, to_device

from octavo.attention import LayerCache, gpu_paged
from octavo.attention.score_options import ScoreOptions
from octavo.errors import InvalidArgumentError

QUERY_LENS = [[1, 1, 1], [3, 60, 90]]


@pytest.mark.parametrize("window", [None, 20])
@fewer("right", [1, 40, None])
@pytest.mark.parametrize("query_lens", QUERY_LENS)
def test_keys_after_the_query(query_lens, right, window):
    check([70, 100, 90], query_lens, right=right, window=window)


@fewer("right", [0, 3, None])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("query_lens", QUERY_LENS)
def test_keys_before_the_first_one_are_not_read(query_lens, window, right):
    """They are NaN; a first key may lie beyond all that a token sees, or beyond the sequence."""
    check([130, 100, 90], query_lens, kv_begin=[65, 17, 500], window=window, right=right)


@pytest.mark.parametrize("right", [0, None])
@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1], [7, 40, 1, 2]])
def test_sequences_in_one_block(query_lens, right):
    """Ragged keys without pages: one block, whose tokens belong to one sequence after the other."""
    lens = [7, 100, 1, 33]
    ends = torch.tensor(lens).cumsum(0)
    case = make_case(ends.tolist(), query_lens, rows=[[0]] * 4, block_size=141)
    case.k_cache.normal_()
    case.v_cache.normal_()
    table, begin = torch.zeros(4, 1, dtype=torch.int32), (ends - torch.tensor(lens)).int()
    case = replace(case, metadata=replace(case.metadata, block_table=table, kv_begin=begin))
    assert_close(case, run(case, right=right), right=right)


def test_dense_caches_of_any_length_share_kernels():
    """One block per sequence: kernels are compiled for no block size in particular."""
    shapes = set()
    for size in (65, 70):
        case = make_case([size, 33, 17], [1, 20, 17], block_size=size)
        table = case.metadata.block_table[:, :1].contiguous()
        case = replace(case, metadata=replace(case.metadata, block_table=table))
        assert_close(case, run(case))
        shapes.add(gpu_paged._block_size(case.cache, case.metadata))
    assert len(shapes) == 1


@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 40), (59, 20), (192, 128)])
def test_values_of_another_head_dim(head_dim, value_dim):
    check([70, 33, 17], [1, 20, 17], head_dim=head_dim, value_dim=value_dim, block_size=7)


def test_values_of_another_head_dim_in_pieces(monkeypatch):
    """Of one decoding sequence, and of a prompt's parts."""
    check([500], [1], head_dim=16, value_dim=40)
    monkeypatch.setattr("octavo.attention.triton.step_map.num_multiprocessors", lambda device: 8)
    check([1100], [9], head_dim=16, value_dim=40)


def test_float8_values_of_another_head_dim():
    case, (k_scale, v_scale) = make_float8_case([70, 33], [1, 20], head_dim=16, value_dim=40)
    exact = replace(
        case,
        k_cache=case.k_cache.float() * k_scale[:, None],
        v_cache=case.v_cache.float() * v_scale[:, None],
    )
    assert_close(exact, run(case, k_scale=k_scale, v_scale=v_scale), eps=2 * torch.finfo(torch.float16).eps)


@fewer("right", [5, 0, None], every=3)
@pytest.mark.parametrize("query_lens", QUERY_LENS)
def test_slopes_by_head_and_by_sequence(query_lens, right):
    slopes = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    for alibi_slopes in (slopes[0], slopes, slopes.T.contiguous().T):
        check([70, 100, 90], query_lens, alibi_slopes=alibi_slopes, right=right, kv_begin=[0, 30, 0])


@pytest.mark.parametrize("query_lens", QUERY_LENS)
def test_scales_by_sequence(query_lens):
    case, _ = make_float8_case([70, 100, 90], query_lens)
    k_scale, v_scale = torch.rand(2, 3, 2, generator=torch.Generator().manual_seed(0)) + 0.5
    out, lse = run(case, k_scale=k_scale, v_scale=v_scale)
    bounds = case.metadata.cu_seqlens_q.tolist()
    for s in range(3):
        alone = run(case, k_scale=k_scale[s].contiguous(), v_scale=v_scale[s].contiguous())
        tokens = slice(bounds[s], bounds[s + 1])
        assert torch.equal(out[tokens], alone[0][tokens])
        assert torch.equal(lse[tokens], alone[1][tokens])


@fewer("num_splits", [1, 2, 3, 100])
@pytest.mark.parametrize(("seq_lens", "query_lens"), [([300, 0, 65, 2], [1, 1, 1, 1]), ([300, 80], [9, 80])])
def test_keys_are_read_in_as_many_parts_as_asked_for(seq_lens, query_lens, num_splits):
    check(seq_lens, query_lens, num_splits=num_splits, right=2)
    moved = to_device(make_case(seq_lens, query_lens))
    made = gpu_paged.make_step_map(moved.q, moved.cache, moved.metadata, num_splits=num_splits)
    assert made.decode is None
    assert made.prefill.num_parts == min(num_splits, -(-300 // made.prefill.shape.keys))


def test_splits_leave_no_row_unwritten():
    """Rows of q that no sequence covers: 0 and -inf."""
    case = make_case([40, 30], [1, 2])
    q = torch.cat([case.q, torch.full_like(case.q, torch.nan)])
    positions = torch.cat([case.metadata.positions, torch.full((3,), 1 << 30, dtype=torch.int32)])
    padded = replace(case, q=q, metadata=replace(case.metadata, positions=positions))
    for right in (0, None):
        out, lse = run(padded, num_splits=2, right=right)
        assert torch.equal(out[:3], run(case, num_splits=2, right=right)[0])
        assert not out[3:].any()
        assert (lse[3:] == -torch.inf).all()
        assert torch.equal(run(padded, right=right)[0][3:], out[3:])


def test_one_part_has_the_same_bits_beside_other_sequences():
    case = make_case([300, 65, 20], [1, 1, 1])
    together = run(case, num_splits=1)
    row = slice(0, 1)
    metadata = replace(
        case.metadata,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        **{name: getattr(case.metadata, name)[row] for name in ("seq_lens", "positions", "block_table")},
    )
    alone = run(replace(case, q=case.q[row], metadata=metadata), num_splits=1)
    assert torch.equal(together[0][row], alone[0])
    assert torch.equal(together[1][row], alone[1])


def test_full_tiles_of_tokens_that_see_all_keys_need_no_mask():
    moved = to_device(make_case([300], [130]))
    units = gpu_paged.make_step_map(moved.q, moved.cache, moved.metadata, right=None).prefill.units.tolist()
    assert {tuple(unit[3:7]) for unit in units if unit[2] > 0} == {(0, 300, 0, 300)}
    begins = to_device(make_case([300], [130], kv_begin=[70]))
    units = gpu_paged.make_step_map(
        begins.q, begins.cache, begins.metadata, right=None
    ).prefill.units.tolist()
    assert {tuple(unit[3:7]) for unit in units if unit[2] > 0} == {(70, 300, 70, 300)}


@fewer("head_dim", [1, 40, 59, 96, 256, 192])
@pytest.mark.parametrize("block_size", [1, 7, 48, 1025])
def test_any_head_dim_in_blocks_of_any_size(head_dim, block_size):
    check([70, 33, 17], [1, 20, 17], head_dim=head_dim, block_size=block_size)


@pytest.mark.parametrize("query_lens", QUERY_LENS)
def test_float32_is_exact(query_lens):
    """Numbers that TF32's 10 bits cannot hold: 1 + 2^-12, weighed by scores that it would round."""
    case = make_case([70, 100, 90], query_lens, head_dim=64)
    assert_close(case, run(case))
    fine = 1 + 2.0**-12
    case.k_cache.fill_(0)
    case.v_cache.fill_(fine)
    case.k_cache[..., 0] = fine
    case.q.fill_(0)
    case.q[..., 0] = fine
    out, lse = run(case, scale=1.0)
    seen = case.metadata.positions.float() + 1
    torch.testing.assert_close(out, torch.full_like(out, fine), rtol=2e-7, atol=0)
    expected = (fine**2 + seen.log()).unsqueeze(1).expand_as(lse)
    torch.testing.assert_close(lse, expected, rtol=1e-6, atol=0)


def test_what_a_forest_cannot_share_is_refused():
    case, _ = make_float8_case([70, 33], [1, 20])
    with pytest.raises(InvalidArgumentError, match="need the same alibi_slopes"):
        gpu_paged._check_forest(case.cache, ScoreOptions(1.0, alibi_slopes=torch.zeros(2, 4)))
    scaled = LayerCache(case.k_cache, case.v_cache, torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(InvalidArgumentError, match="need the same alibi_slopes"):
        gpu_paged._check_forest(scaled, ScoreOptions(1.0))
    wide = make_case([70], [1], value_dim=8)
    with pytest.raises(InvalidArgumentError, match="keys and values of one head dim, got 16 and 8"):
        gpu_paged._check_forest(wide.cache, ScoreOptions(1.0))


def test_a_map_for_other_keys_after_the_query_is_refused():
    moved = to_device(make_case([20], [1]))
    step_map = gpu_paged.make_step_map(moved.q, moved.cache, moved.metadata)
    with pytest.raises(InvalidArgumentError, match="right 0, this layer has None and None"):
        gpu_paged.attend_with_map(
            moved.q, moved.cache, moved.metadata, ScoreOptions(1.0, right=None), step_map
        )


def test_store_of_values_of_another_head_dim():
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(3, 2, size, generator=generator).to(DEVICE) for size in (20, 7))
    k_cache, v_cache = (torch.full((3, 4, 2, size), torch.nan, device=DEVICE) for size in (20, 7))
    with poisoned_memory():
        slots = torch.tensor([11, -1, 0], device=DEVICE)
        gpu_paged.store_kv(k, v, LayerCache(k_cache, v_cache), slots)
    for rows, cache in ((k, k_cache), (v, v_cache)):
        assert torch.equal(cache[2, 3], rows[0])
        assert torch.equal(cache[0, 0], rows[2])
        assert int((~cache.isnan()).sum()) == 2 * rows[0].numel()
