"""Every argument of octavo.ops with every other, drawn at random, against a dense float64 oracle."""

import pytest
import torch
from kvcache_cases import kvcache_case
from ops_cases import EPSILON, Maker, dense_case, varlen_case

KINDS = (kvcache_case, kvcache_case, kvcache_case, varlen_case, varlen_case, dense_case)
PER_TEST = 20
PER_KERNEL = 10  # on a GPU: cases that share what is compiled
ENOUGH = 16  # results that make a bound by torch; figures in docs/log.md
HALVES = (torch.float32, torch.bfloat16, torch.bfloat16, torch.float16)


def check(case):
    """Compare a call with its oracle: twice the error that torch makes in the same dtype, plus 1e-5."""
    _within("out", errors_of(case, case.run()))


def errors_of(case, results):
    """Check all of a call's results but its output; return the output's greatest errors: our own, torch's."""
    out, lse = results
    truth, true_lse = case.oracle(torch.float64)
    plain, plain_lse = case.oracle(case.product_dtype)
    assert out.dtype == case.dtype
    unseen = true_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, unseen), "lse is -inf where nothing is visible, and only there"
    _within("lse", _errors(*(x.double().masked_fill(unseen, 0.0) for x in (lse, true_lse, plain_lse))))
    assert bool((out[unseen] == 0).all()), "a query that sees nothing gives 0"
    return _errors(out, truth, plain)


def _errors(actual, truth, plain):
    if actual.numel() == 0:
        return 0.0, 0.0
    return tuple((x.double() - truth).abs().max().item() for x in (actual, plain))


def _within(name, errors):
    error, torch_error = errors
    bound = 2 * torch_error + EPSILON
    assert error <= bound, f"{name}: error {error:.3g}, bound {bound:.3g}"


def run_cases(first_seed, device, dtypes, per_kernel, run=lambda case: case.run()):
    """Check PER_TEST cases, each by itself, and the per_kernel cases of a kernel together.

    A case of few results is only checked with its kernel: torch's error in so few says nothing.
    """
    for first in range(first_seed, first_seed + PER_TEST, per_kernel):
        errors = []
        for seed in range(first, first + per_kernel):
            kernel_seed = seed // per_kernel
            case = KINDS[kernel_seed % len(KINDS)](Maker(seed, device, dtypes, kernel_seed))
            try:
                results = run(case)
                errors.append(errors_of(case, results))
                if results[0].numel() >= ENOUGH:
                    _within("out", errors[-1])
            except Exception as error:
                shapes = {
                    n: list(x.shape) if isinstance(x, torch.Tensor) else x for n, x in case.arguments.items()
                }
                raise AssertionError(
                    f"seed {seed}, {case.dtype}, {case.function.__name__}({shapes}): {error}"
                ) from error
        # Python's max may lose a NaN.
        greatest = torch.tensor(errors, dtype=torch.float64).amax(dim=0).tolist()
        _within(f"seeds {first} to {first + per_kernel - 1}, out", greatest)


def rounded(case):
    """Return what a tensor core makes of a case at best: weights and results are rounded, nothing else is."""
    case.run()  # it writes a cache's new keys
    out, lse = case.oracle(torch.float64, kept=case.product_dtype)
    return out.to(case.dtype), lse.float()


@pytest.mark.parametrize("block", range(26))
def test_cpu(block):
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
    run_cases(block * PER_TEST, "cpu", dtypes, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    "block",
    [pytest.param(block, marks=pytest.mark.slow if block % 40 else pytest.mark.long) for block in range(260)],
)
def test_gpu(block):
    run_cases(100_000 + block * PER_TEST, "cuda", HALVES, PER_KERNEL)


@pytest.mark.parametrize("first", [100_400, 101_940, 103_800, 104_540])
def test_bounds_allow_what_a_tensor_core_rounds(first):
    """Each has a case of 12 results or fewer in which torch is more than twice as exact, by luck."""
    run_cases(first, "cpu", HALVES, PER_KERNEL, rounded)
