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


def kind_of(layout):
    """The kind of the matrix's cases with a layout, which is the seed of what they agree on."""
    return KINDS[layout % len(KINDS)]


def draw_on_gpu(kind, first_seed, number):
    """The case of a kind with a number; the first ones have layouts and options of the matrix."""
    first_layouts = [(GPU_SEED + block * PER_TEST) // PER_KERNEL for block in QUICK_BLOCKS]
    layouts = [first + part for first in first_layouts for part in range(PER_TEST // PER_KERNEL)]
    compiled = [layout for layout in layouts if kind_of(layout) is kind]
    seed = first_seed + number
    return kind(Maker(seed, "cuda", GPU_DTYPES, compiled[number] if number < len(compiled) else seed))
