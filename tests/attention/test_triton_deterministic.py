"""Deterministic steps: right by the oracle, and made of one kind of work."""

import pytest
import torch
from triton_cases import assert_close, make_case, poisoned_memory, to_device

from octavo.attention import LayerCache, gpu_paged
from octavo.attention.hopper import tma_prefill as hopper_prefill
from octavo.attention.score_options import ScoreOptions
from octavo.attention.triton.kernel_call import empty_results, make_call
from octavo.attention.triton.step_map import make_step_map


def run_deterministic(case, *, scale=None, **options):
    """Attend by a deterministic map; (out, lse) on the CPU."""
    moved = to_device(case)
    scores = ScoreOptions(case.q.shape[-1] ** -0.5 if scale is None else scale, **options)
    with poisoned_memory():
        step_map = gpu_paged.make_step_map(
            moved.q, moved.cache, moved.metadata, scores.window, deterministic=True
        )
        out, lse = gpu_paged.attend_with_map(moved.q, moved.cache, moved.metadata, scores, step_map)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"softcap": 5.0}])
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [([1, 130, 64, 65], [1, 1, 1, 1]), ([90, 5, 0, 200, 64], [60, 1, 1, 3, 64]), ([300], [70])],
)
def test_against_the_oracle(seq_lens, query_lens, options):
    """Sequences without keys get 0 and -inf, as from other maps."""
    case = make_case(seq_lens, query_lens)
    assert_close(case, run_deterministic(case, **options), **options)


@pytest.mark.parametrize(
    "shape", [{"heads": 9, "kv_heads": 3}, {"heads": 3, "kv_heads": 1, "block_size": 64}]
)
def test_groups_that_do_not_divide_a_tile(shape):
    case = make_case([100, 30], [40, 1], **shape)
    assert_close(case, run_deterministic(case))


@pytest.mark.parametrize("window", [None, 30])
def test_all_tokens_are_in_units_of_one_class_whose_keys_are_masked_in_one_loop(window):
    query_lens = [130, 1, 70, 9]
    moved = to_device(make_case([1500, 90, 150, 64], query_lens))
    made = gpu_paged.make_step_map(moved.q, moved.cache, moved.metadata, window, deterministic=True)
    assert made.decode is None
    assert made.forest is None
    assert made.prefill.num_parts == 1
    units = [unit for unit in made.prefill.units.tolist() if unit[2] > 0]
    assert sum(unit[2] for unit in units) == sum(query_lens)
    assert {unit[0] for unit in units} == {0, 1, 2, 3}
    assert all(unit[5] == unit[6] == 0 for unit in units)


def test_large_groups_do_not_take_the_hopper_kernel():
    """Its tile has 128 rows, as has that of more than 64 heads."""
    moved = to_device(make_case([100], [3], heads=128, kv_heads=1, head_dim=64, block_size=64))
    work = make_step_map(
        moved.metadata,
        num_tokens=3,
        num_heads=128,
        num_kv_heads=1,
        head_dim=64,
        dtype=torch.bfloat16,
        deterministic=True,
    ).prefill
    assert work.shape.rows == 128
    q, cache = moved.q.bfloat16(), moved.k_cache.bfloat16()
    tables = (moved.metadata.positions, moved.metadata.block_table)
    call = make_call(q, LayerCache(cache, cache), *tables, ScoreOptions(1.0), empty_results(q))
    assert "not deterministic" in hopper_prefill.unsupported_reason(call, work)
