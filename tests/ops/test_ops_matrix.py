"""Every argument of octavo.ops with every other, drawn at random, against a dense float64 oracle."""

import pytest
import torch
from kvcache_cases import kvcache_case
from ops_cases import EPSILON, Maker, dense_case, varlen_case

KINDS = (kvcache_case, kvcache_case, kvcache_case, varlen_case, varlen_case, dense_case)
PER_TEST = 20
PER_KERNEL = 10  # on a GPU: cases that share what is compiled


def check(case):
    """Compare a call with its oracle: twice the error that torch makes in the same dtype, plus 1e-5."""
    out, lse = case.run()
    truth, true_lse = case.oracle(torch.float64)
    plain, plain_lse = case.oracle(case.product_dtype)
    assert out.dtype == case.dtype
    _close("out", out, truth, plain)
    unseen = true_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, unseen), "lse is -inf where nothing is visible, and only there"
    _close("lse", *(x.double().masked_fill(unseen, 0.0) for x in (lse, true_lse, plain_lse)))
    assert bool((out[unseen] == 0).all()), "a query that sees nothing gives 0"


def _close(name, actual, truth, plain):
    if actual.numel() == 0:
        return
    error = (actual.double() - truth).abs().max().item()
    bound = 2 * (plain.double() - truth).abs().max().item() + EPSILON
    assert error <= bound, f"{name}: error {error:.3g}, bound {bound:.3g}"


def run_cases(first_seed, device, dtypes, per_kernel):
    for seed in range(first_seed, first_seed + PER_TEST):
        kernel_seed = seed // per_kernel
        case = KINDS[kernel_seed % len(KINDS)](Maker(seed, device, dtypes, kernel_seed))
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
    "block", [pytest.param(block, marks=[pytest.mark.slow] if block % 20 else []) for block in range(260)]
)
def test_gpu(block):
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16, torch.float16)
    run_cases(100_000 + block * PER_TEST, "cuda", dtypes, PER_KERNEL)
