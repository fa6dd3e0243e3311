"""Every argument of octavo.ops with every other, drawn at random, against a dense float64 oracle."""

import sys

import pytest
import torch
from drawn_cases import GPU_DTYPES, GPU_SEED, PER_KERNEL, PER_TEST, QUICK_BLOCKS, kind_of
from ops_cases import EPSILON, Maker


def check(case):
    """Compare a call with its oracle: twice the error that torch makes in the same dtype, plus 1e-5.

    On a GPU, or what its tensor cores round at best, plus 1e-5: in a few numbers torch is more exact now and
    then, by luck.
    """
    out, lse = case.run()
    truth, true_lse = case.oracle(torch.float64)
    plain, plain_lse = case.oracle(case.product_dtype)
    assert out.dtype == case.dtype
    if is_rounded_by_tensor_cores(case) and _error(out, truth) > _bound(plain, truth):
        error, bound = _error(out, truth), _error(rounded(case), truth) + EPSILON
        assert error <= bound, f"out: error {error:.3g}, bound {bound:.3g} by rounding alone"
    else:
        _close("out", out, truth, plain)
    unseen = true_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, unseen), "lse is -inf where nothing is visible, and only there"
    _close("lse", *(x.double().masked_fill(unseen, 0.0) for x in (lse, true_lse, plain_lse)))
    assert bool((out[unseen] == 0).all()), "a query that sees nothing gives 0"


def is_rounded_by_tensor_cores(case):
    return case.product_dtype in (torch.float16, torch.bfloat16) and case.sequences[0].q.is_cuda


def rounded(case):
    """Return a case's output if weights and results are rounded for tensor cores, and nothing else."""
    return case.oracle(torch.float64, kept=case.product_dtype)[0].to(case.dtype)


def _error(actual, truth):
    return (actual.double() - truth).abs().max().item() if actual.numel() else 0.0


def _bound(plain, truth):
    return 2 * _error(plain, truth) + EPSILON


def _close(name, actual, truth, plain):
    error, bound = _error(actual, truth), _bound(plain, truth)
    assert error <= bound, f"{name}: error {error:.3g}, bound {bound:.3g}"


def run_cases(first_seed, device, dtypes, per_kernel):
    for seed in range(first_seed, first_seed + PER_TEST):
        kernel_seed = seed // per_kernel
        case = kind_of(kernel_seed)(Maker(seed, device, dtypes, kernel_seed))
        try:
            check(case)
        except Exception as error:
            shapes = {
                n: list(x.shape) if isinstance(x, torch.Tensor) else x for n, x in case.arguments.items()
            }
            raise AssertionError(
                f"seed {seed}, {case.dtype}, {case.function.__name__}({shapes}): {error}"
            ) from error


@pytest.mark.parametrize("block", range(26))
def test_cpu(block):
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
    run_cases(block * PER_TEST, "cpu", dtypes, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    "block",
    [pytest.param(block, marks=[] if block in QUICK_BLOCKS else [pytest.mark.slow]) for block in range(260)],
)
def test_gpu(block):
    run_cases(GPU_SEED + block * PER_TEST, "cuda", GPU_DTYPES, PER_KERNEL)


@pytest.mark.parametrize(("seed", "num_results"), [(100_400, 12), (101_951, 5), (103_806, 1), (104_549, 3)])
def test_the_bound_allows_what_a_tensor_core_rounds_and_no_more(monkeypatch, seed, num_results):
    """Of 3,732 cases in half precision these are all whose rounding exceeds twice torch's error."""
    case = kind_of(seed // PER_KERNEL)(Maker(seed, "cpu", GPU_DTYPES, seed // PER_KERNEL))
    _, lse = case.run()
    out = rounded(case)
    assert out.numel() == num_results
    monkeypatch.setattr(case, "run", lambda: (out, lse))
    with pytest.raises(AssertionError, match="out: error"):
        check(case)
    monkeypatch.setattr(sys.modules[__name__], "is_rounded_by_tensor_cores", lambda case: True)
    check(case)
    truth = case.oracle(torch.float64)[0]
    out += (2 * (out.double() - truth)).to(out.dtype)
    with pytest.raises(AssertionError, match="by rounding alone"):
        check(case)
