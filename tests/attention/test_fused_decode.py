"""The kernel for the token of one sequence, or of a few, interpreted: against the plain reference."""

from dataclasses import replace

import pytest
import torch
import triton_cases
from fused_decode_cases import AloneCase

from octavo.attention.cache import FLOAT8
from octavo.attention.step import fused_decode
from octavo.kernels.launch import launch
from octavo.layers.norm import HeadRMSNorm
from octavo.layers.steps.gpu_step import TritonStep

pytestmark = pytest.mark.skipif(triton_cases.HAS_GPU, reason="test_fused_decode_gpu.py runs it on the GPU")


@pytest.fixture(params=[1, 2, 7], autouse=True)
def num_splits(request, monkeypatch):
    """Programs of a kv head; FusedWork.allocate divides SMs among kv heads, and here some are left."""
    allocate = fused_decode.FusedWork.allocate

    def allocate_splits(cache, num_heads):
        with monkeypatch.context() as patch:
            num_kv_heads = cache.k.shape[2]
            num_multiprocessors = (request.param + 1) * num_kv_heads - 1
            patch.setattr(fused_decode, "num_multiprocessors", lambda _: num_multiprocessors)
            work = allocate(cache, num_heads)
        assert (work.num_splits, work.num_programs) == (request.param, num_multiprocessors)
        return work

    monkeypatch.setattr(fused_decode.FusedWork, "allocate", allocate_splits)
    monkeypatch.setattr("octavo.attention.step.fused_decode.most_sequences", lambda *_: request.param)
    return request.param


@pytest.fixture
def kernels(monkeypatch):
    """Kernels that attend_fused has launched."""
    launched = []
    monkeypatch.setattr(
        fused_decode,
        "launch",
        lambda kernel, *given, **options: (launched.append(kernel), launch(kernel, *given, **options)),
    )
    return launched


def check(case, bound=2e-6):
    (out, data), (expected, stored) = case.by_kernel(), case.by_operators()
    assert (out - expected).abs().max() < bound
    torch.testing.assert_close(data, stored, rtol=0, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("block_size", [4, 16, 128])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 129, 450, 1000])
def test_lengths(length, block_size):
    check(AloneCase(length, block_size=block_size))


@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((1, 1), 2), ((9, 3), 24), ((7, 1), 64), ((20, 1), 32), ((16, 8), 80), ((2, 2), 128), ((4, 1), 512)],
)
@pytest.mark.parametrize("has_norm", [False, True])
def test_heads(heads, head_dim, has_norm):
    check(AloneCase(150, heads=heads, head_dim=head_dim, has_norm=has_norm))


@pytest.mark.parametrize(
    "values", [{"value_norm": 1e-6}, {"keys_are_values": True}, {"value_norm": 1e-6, "keys_are_values": True}]
)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"heads": (7, 1), "head_dim": 80},
        {"cache_dtype": FLOAT8},
        {"has_norm": False, "length": (70, 130)},
    ],
)
def test_values_that_are_normed_or_are_keys(values, shape, num_splits, kernels):
    """Whether one kernel attends them or several do."""
    case = AloneCase(**({"length": 130} | shape | values))
    if "cache_dtype" in shape:
        (out, data), (expected, stored) = case.by_kernel(), case.by_kernel(alone=False)
        assert torch.equal(data.view(torch.uint8), stored.view(torch.uint8))
        assert (out - expected).abs().max() < 2**-9 * expected.abs().max()
        assert (out - case.by_operators()[0]).abs().max() < 0.05
    else:
        check(case)
    assert len(kernels) == (len(case.qkv) <= num_splits)


@pytest.mark.parametrize("has_gemvs", [False, True])
def test_a_layer_reads_the_cache_of_another_one_and_leaves_it_as_it_is(has_gemvs, kernels):
    """Its projection has query heads only; what they see was stored in the same step."""
    case = AloneCase((130, 70), heads=(4, 1), head_dim=32)
    expected, stored = case.by_operators()
    options = replace(case.options, shares_cache=True, has_gemvs=has_gemvs)
    weight = case.options.qk_norm.weight[:4].contiguous()
    options = replace(options, qk_norm=HeadRMSNorm(weight, case.options.qk_norm.eps))
    step = TritonStep(case.cache, case.metadata, num_heads=4)
    rotations = torch.stack((case.angles.cos(), case.angles.sin()))
    out = step.attend(case.qkv[:, : 4 * 32].contiguous(), rotations, options)
    assert (out - expected).abs().max() < 2e-6
    assert torch.equal(case.cache.data.nan_to_num(9.0), stored.nan_to_num(9.0))
    assert kernels == []


def test_heads_that_do_not_fit_in_registers_have_other_kernels(kernels):
    check(AloneCase(70, heads=(32, 1), head_dim=512))
    assert kernels == []


@pytest.mark.parametrize("window", [1, 5, 64, 100, 200, 1000])
@pytest.mark.parametrize("length", [3, 64, 300])
def test_windows(length, window):
    check(AloneCase(length, window=window, has_sinks=window % 5 == 0))


@pytest.mark.parametrize("length", [1, 300])
def test_softcap_and_sinks(length):
    check(AloneCase(length, softcap=3.0))
    check(AloneCase(length, has_sinks=True))


@pytest.mark.parametrize("length", [1, 64, 130])
def test_without_a_slot_the_key_in_the_cache_is_attended(length):
    case = AloneCase(length, is_stored=False)
    check(case)
    assert torch.equal(case.by_kernel()[1].nan_to_num(9.0), case.old.nan_to_num(9.0))


@pytest.mark.parametrize("position", [-1, 0, 7])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_sequence_that_has_ended_sees_nothing(has_sinks, position):
    """As a row of a captured step is that nobody needs: no keys, no slot."""
    case = AloneCase(70, is_stored=False, has_sinks=has_sinks)
    empty, at = torch.zeros(1, dtype=torch.int32), torch.tensor([position], dtype=torch.int32)
    case.metadata = replace(case.metadata, seq_lens=empty, positions=at)
    out, data = case.by_kernel()
    assert not out.any()
    assert torch.equal(data.nan_to_num(9.0), case.old.nan_to_num(9.0))


@pytest.mark.parametrize(
    "lengths", [(300,), (1, 1), (70, 130), (64, 0), (0, 1000, 63, 2), (5,) * 7, (900, *[3] * 6)]
)
@pytest.mark.parametrize("window", [None, 100])
def test_several_sequences(lengths, window, num_splits, kernels):
    """Some are long, some short, some padding; each attends as if it were alone."""
    case = AloneCase(lengths, window=window, has_sinks=window is not None)
    check(case)
    # Each sequence has a program for each kv head, or other kernels attend them.
    assert len(kernels) == (len(lengths) <= num_splits)
    assert not case.by_kernel()[0][[length == 0 for length in lengths]].any()


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("length", [1, 65, 200, (1, 90, 0)])
def test_float8_caches(length, is_scaled):
    """As the kernels for any step: a key near a tie may round either way. Products are of float16."""
    case = AloneCase(length, cache_dtype=FLOAT8, is_scaled=is_scaled)
    (out, data), (expected, stored) = case.by_kernel(), case.by_kernel(alone=False)
    assert torch.equal(data.view(torch.uint8), stored.view(torch.uint8))
    assert (out - expected).abs().max() < 2**-9 * expected.abs().max()
    assert (out - case.by_operators()[0]).abs().max() < 0.01


@pytest.mark.parametrize("length", [450, (0, 450, 130)])
def test_a_layer_is_one_launch_and_leaves_nothing_behind(length, num_splits, kernels):
    """Counters are zero again: the next layer finds what the first one found."""
    case = AloneCase(length)
    num_sequences = len(case.qkv)
    if num_sequences > num_splits:
        pytest.skip("other kernels attend them")
    step, rotations = TritonStep(case.cache, case.metadata, num_heads=4), torch.ones(2, num_sequences, 8)
    results = [step.attend(case.qkv.clone(), rotations, case.options) for _ in range(3)]
    assert kernels == [fused_decode._attend_fused_kernel] * 3
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("change", ["two tokens", "deterministic", "two sequences", "other GEMMs"])
def test_other_steps_have_other_kernels(change, monkeypatch):
    def never(*_):
        raise AssertionError("the kernel for one token")

    monkeypatch.setattr("octavo.layers.steps.gpu_step.attend_fused", never)
    dtype = torch.float16 if change == "deterministic" else torch.float32
    case = AloneCase(30, is_stored=False, dtype=dtype)
    metadata, rotations, qkv = case.metadata, torch.ones(2, 1, 8), case.qkv
    if change == "two tokens":
        positions, slots = torch.tensor([28, 29], dtype=torch.int32), torch.tensor([-1, -1])
        metadata = replace(
            metadata,
            cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32),
            positions=positions,
            slot_mapping=slots,
            max_query_len=2,
        )
    if change == "two sequences":
        metadata = replace(
            metadata,
            cu_seqlens_q=torch.tensor([0, 1, 1], dtype=torch.int32),
            seq_lens=torch.tensor([30, 0], dtype=torch.int32),
            block_table=metadata.block_table.repeat(2, 1),
        )
    num_tokens = metadata.positions.shape[0]
    qkv, rotations = qkv.repeat(num_tokens, 1), rotations.repeat(1, num_tokens, 1)
    step = TritonStep(case.cache, metadata, num_heads=4, deterministic=change == "deterministic")
    options = replace(case.options, has_gemvs=change != "other GEMMs")
    assert step.attend(qkv, rotations, options).isfinite().all()
