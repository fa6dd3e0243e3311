"""octavo.ops gives the same whatever PyTorch is set to: default dtype and device, autocast, modes."""

from contextlib import contextmanager

import pytest
import torch
from kvcache_cases import kvcache_case
from ops_cases import Maker, dense_case, varlen_case
from test_ops_matrix import check

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS = {
    "default float16": lambda: default_dtype(torch.float16),
    "default float64": lambda: default_dtype(torch.float64),
    # What is made without a device has no memory there.
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic_algorithms,
    "inference mode": torch.inference_mode,
}


def same_in(surrounding, case):
    """Check a case that runs in a surrounding; all else runs outside of it."""
    function = case.function

    def run(**arguments):
        with SURROUNDINGS[surrounding]():
            return function(**arguments)

    case.function = run
    check(case)


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("kind", [kvcache_case, varlen_case, dense_case])
def test_cpu(surrounding, kind):
    for seed in range(700_000, 700_010):
        same_in(surrounding, kind(Maker(seed, "cpu", DTYPES)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("surrounding", ["default float16", "inference mode"])
@pytest.mark.parametrize("kind", [kvcache_case, varlen_case, dense_case])
def test_gpu(surrounding, kind):
    for seed in range(700_000, 700_004):
        same_in(surrounding, kind(Maker(seed, "cuda", (torch.float32, torch.bfloat16), 700_000)))
