"""Heads of 256 and of 512 on a real GPU: decoding, prompts, mixed steps, windows, float8, forests, graphs."""

from dataclasses import replace

import pytest
import test_fused_decode_gpu
import test_triton_float8_gpu
import test_triton_forest_gpu
import torch
from fused_decode_cases import AloneCase
from test_triton_gpu import assert_within_twice_plain_torch
from triton_cases import DEVICE, HAS_GPU, make_case, to_device

from octavo.attention import gpu_paged
from octavo.attention.cache import FLOAT8
from octavo.attention.score_options import ScoreOptions
from octavo.layers.steps.gpu_step import TritonStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")]

# Query heads and kv heads of Gemma 4's full layers, and more query heads on a kv head than tiles have rows.
HEADS = [(8, 1), (8, 2), (16, 2), (32, 4), (32, 1)]
STEPS = {
    "alone": ([5000], [1]),
    "decode": ([1, 700, 64, 0, 65, 3000], [1, 1, 1, 1, 1, 1]),
    "many": ([*range(1, 600, 7)], [1] * 86),
    "prompts": ([300, 64, 17], [300, 64, 17]),
    "mixed": ([200, 130, 90, 400, 33, 0, 70] + [40] * 8, [200, 100, 1, 130, 33, 0, 1] + [36] * 8),
    "few long": ([4000], [9]),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("head_dim", "window"), [(512, None), (256, None), (256, 100), (512, 100)])
def test_steps(step, heads, kv_heads, head_dim, window):
    case = make_case(
        *STEPS[step], heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=64, dtype=torch.bfloat16
    )
    assert_within_twice_plain_torch(case, **({} if window is None else {"window": window}))


@pytest.mark.parametrize("block_size", [1, 16, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_blocks_and_dtypes(dtype, block_size):
    case = make_case(
        [300, 70, 40], [120, 1, 40], heads=8, kv_heads=1, head_dim=512, block_size=block_size, dtype=dtype
    )
    assert_within_twice_plain_torch(case)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (16, 2), (32, 1)])
@pytest.mark.parametrize(("head_dim", "window"), [(512, None), (256, 100)])
def test_float8_caches(step, heads, kv_heads, head_dim, window):
    test_triton_float8_gpu.check(
        *STEPS[step], heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=64, window=window
    )


@pytest.mark.parametrize("query_lens", [[1] * 40, [1] * 3, [1] * 20 + [70] * 4])
@pytest.mark.parametrize("head_dim", [256, 512])
def test_forests(head_dim, query_lens):
    """Many query tokens under a node, few, and prompts beside sequences that decode."""
    case = test_triton_forest_gpu.shared_case(query_lens, head_dim=head_dim, heads=16)
    test_triton_forest_gpu.assert_within_twice_plain_torch(case)


@pytest.mark.parametrize("lengths", [1, 65, 3000, (700, 30), (3, 0, 1, 900)])
@pytest.mark.parametrize("heads", [(8, 1), (32, 4), (4, 2)])
@pytest.mark.parametrize("values", [{}, {"value_norm": 1e-6}, {"value_norm": 1e-6, "keys_are_values": True}])
def test_one_kernel_for_few_sequences(values, heads, lengths):
    test_fused_decode_gpu.check(length=lengths, heads=heads, head_dim=512, dtype=torch.bfloat16, **values)


@pytest.mark.parametrize("values", [{}, {"value_norm": 1e-6, "keys_are_values": True}])
@pytest.mark.parametrize("head_dim", [256, 512])
def test_one_kernel_over_float8(head_dim, values):
    """The same bytes in the cache as by the kernels for any step, and nearly the same results."""
    shape = {"heads": (16, 2), "head_dim": head_dim, "dtype": torch.bfloat16, "cache_dtype": FLOAT8}
    case = AloneCase(700, is_scaled=True, device="cuda", **shape, **values)
    (out, data), (other, stored) = case.by_kernel(), case.by_kernel(alone=False)
    assert torch.equal(data.view(torch.uint8), stored.view(torch.uint8))
    assert (out - other).abs().max() <= 2**-7 * other.abs().max()


@pytest.mark.parametrize("window", [None, 100])
def test_deterministic_steps_give_a_row_the_same_bits_in_any_batch(window):
    """One tiling for prompts and for decoding."""
    sizes = {"heads": 16, "kv_heads": 2, "head_dim": 512, "block_size": 64, "dtype": torch.bfloat16}
    case = to_device(make_case([300, 70, 40], [120, 1, 40], **sizes))
    options = ScoreOptions(512**-0.5, window)

    def attend(metadata, q):
        step_map = gpu_paged.make_step_map(q, case.cache, metadata, window, deterministic=True)
        return gpu_paged.attend_with_map(q, case.cache, metadata, options, step_map)[0]

    together, metadata = attend(case.metadata, case.q), case.metadata
    alone = replace(
        metadata,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
        seq_lens=metadata.seq_lens[1:2],
        positions=metadata.positions[120:121],
        slot_mapping=metadata.slot_mapping[120:121],
        block_table=metadata.block_table[1:2],
        max_query_len=1,
    )
    assert torch.equal(attend(alone, case.q[120:121]), together[120:121])


def test_layers_of_several_sizes_replay_in_one_graph():
    """A windowed layer with heads of 256 beside a full one of 512, and one that shares the latter's cache."""
    lengths = (300, 900, 70)
    wide = AloneCase(
        lengths, heads=(16, 2), head_dim=512, dtype=torch.bfloat16, device="cuda", value_norm=1e-6,
        keys_are_values=True, block_size=64,
    )  # fmt: skip
    narrow = AloneCase(
        lengths, heads=(16, 8), head_dim=256, window=100, dtype=torch.bfloat16, device="cuda",
        value_norm=1e-6, block_size=64,
    )  # fmt: skip
    reading = replace(wide.options, shares_cache=True, has_gemvs=False, qk_norm=None)

    def run():
        results = []
        for case in (wide, narrow):
            step = TritonStep(case.cache, case.metadata, num_heads=16)
            rotations = torch.stack((case.angles.cos(), case.angles.sin()))
            options = replace(case.options, has_gemvs=False)
            results.append(step.attend(case.qkv.clone(), rotations, options))
            if case is wide:
                q = case.qkv[:, : 16 * 512].contiguous()
                results.append(step.attend(q, rotations, reading))
        return results

    expected = [out.clone() for out in run()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    for out, plain in zip(captured, expected, strict=True):
        assert out.isfinite().all()
        assert torch.equal(out, plain)
