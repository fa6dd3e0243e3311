"""Which random cases the tests of a GPU draw: most of their time is compiling, so they share layouts."""

import torch
from kvcache_cases import kvcache_case
from ops_cases import Maker, dense_case, varlen_case

KINDS = (kvcache_case, kvcache_case, kvcache_case, varlen_case, varlen_case, dense_case)
PER_TEST = 20
PER_KERNEL = 10  # cases that share what is compiled
GPU_DTYPES = (torch.float32, torch.bfloat16, torch.bfloat16, torch.float16)
# The matrix on a GPU: its first seed, and the blocks of PER_TEST seeds that are not slow tests.
GPU_SEED = 100_000
QUICK_BLOCKS = range(0, 260, 20)


def draw_on_gpu(kind, first_seed, number):
    """The case of a kind with a number; the first ones have layouts and options of the matrix."""
    first_seeds = [GPU_SEED + block * PER_TEST for block in QUICK_BLOCKS]
    compiled = [
        seed // PER_KERNEL for first in first_seeds for seed in range(first, first + PER_TEST, PER_KERNEL)
    ]
    compiled = [layout for layout in compiled if KINDS[layout % len(KINDS)] is kind]
    seed = first_seed + number
    return kind(Maker(seed, "cuda", GPU_DTYPES, compiled[number] if number < len(compiled) else seed))
