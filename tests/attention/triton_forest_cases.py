"""Forests of small tiles for tests of the Triton kernels."""

from dataclasses import replace

import torch
from attention_cases import hide_unseen, make_case
from triton_cases import DEVICE, assert_close, poisoned_memory, to_device

from octavo.attention import (
    DeviceForest,
    gpu_paged,
)
from octavo.attention.score_options import ScoreOptions
from octavo.attention.tilings.portable import TileShape
from octavo.attention.triton import step_map as triton_plan

THIN = TileShape(rows=16, keys=16, num_warps=4, num_stages=2, programs_per_multiprocessor=3)
FAT = replace(THIN, rows=32, programs_per_multiprocessor=2)


def make_forest(case, plan_case=None, **options):
    """A forest with NaN where no kernel has written, and the plan of a case uploaded."""
    metadata, plan_case = case.metadata, plan_case or case
    options = {"thin": THIN, "fat": FAT, "min_segment_tokens": 32, "max_units": 4096} | options
    with poisoned_memory():
        forest = DeviceForest(
            max_num_seqs=metadata.seq_lens.shape[0] + 1,
            max_num_tokens=case.q.shape[0] + 3,
            max_partials=4096,
            num_heads=case.q.shape[1],
            num_kv_heads=case.k_cache.shape[2],
            head_dim=case.q.shape[2],
            block_size=case.k_cache.shape[1],
            dtype=case.q.dtype,
            device=DEVICE,
            **options,
        )
    planned = plan_case.metadata
    arrays = (planned.block_table, planned.seq_lens, planned.cu_seqlens_q)
    plan = forest.plan(*(array.numpy() for array in arrays), always=True)
    forest.upload(plan)
    return forest, plan


def shared_case(query_lens=(1, 1, 1, 1, 1), *, block_size=16, **shape):
    """Four sequences under a root of 6 blocks, two of them under a second level; and one by itself."""
    root, second = list(range(6)), [10, 11, 12]
    rows = [[*root, 20], [*root, *second, 21, 22], [*root, *second, 23], [*root, 24, 25, 26], [30, 31]]
    lens = [len(row) * block_size - i for i, row in enumerate(rows)]
    return make_case(lens, list(query_lens), rows=rows, block_size=block_size, **shape)


def make_map(moved, window=None, thin=THIN, right=0):
    heads = (moved.q.shape[1], moved.k_cache.shape[2], moved.q.shape[2])
    names = ("num_heads", "num_kv_heads", "head_dim")
    sizes = dict(zip(names, heads, strict=True), num_tokens=moved.q.shape[0], dtype=moved.q.dtype)
    return triton_plan.make_step_map(
        moved.metadata, window=window, decode=thin, prefill=FAT, right=right, **sizes
    )


def run_shared(case, forest, *, window=None, thin=THIN, **options):
    """Attend with small tiles, so that small cases have many; returns (out, lse) on the CPU."""
    moved = to_device(replace(case, metadata=replace(case.metadata, work=forest)))
    options = {name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in options.items()}
    scores = ScoreOptions(case.q.shape[-1] ** -0.5, window, **options)
    with poisoned_memory():
        step_map = make_map(moved, window, thin, scores.right)
        tensors = (moved.q, moved.cache, moved.metadata)
        out, lse = gpu_paged.attend_with_map(*tensors, scores, step_map)
    return out.cpu(), lse.cpu()


def check(case, **options):
    forest, plan = make_forest(case)
    assert plan.num_units > 0
    assert_close(case, run_shared(case, forest, **options), **options)


def check_window(case, window, *, seed=0, must_share=True, **options):
    """As check, for layers with a window, where what no query sees has become NaN or is another block."""
    case = hide_unseen(case, window, seed)
    forest, plan = make_forest(case, window=window)
    assert plan.num_units > 0 or not must_share
    assert_close(case, run_shared(case, forest, window=window, **options), window=window, **options)
