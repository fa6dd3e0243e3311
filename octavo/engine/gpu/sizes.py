"""The sizes that graphs have: a step takes the next one, and the rest of it is padding.

Every size costs some 20 ms before the engine is ready, and every token of padding is computed for nothing. So
sizes lie close together where computing costs, and apart where a step mostly reads the weights.
"""

from bisect import bisect_left
from collections.abc import Sequence


def sequence_sizes(max_num_seqs: int) -> list[int]:
    """Return rising numbers of sequences, at most a quarter apart from 16 on; the last is max_num_seqs."""
    sizes = [1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 32), *range(256, max_num_seqs, 64)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def token_sizes(max_num_tokens: int) -> list[int]:
    """Return rising numbers of tokens; from 1,024 to 4,096, where most prompts end, a GEMM's tile apart."""
    steps = [(64, 16), (128, 32), (256, 64), (512, 64), (1024, 128), (4096, 128), (max_num_tokens, 512)]
    sizes = [16]
    for limit, step in steps:
        sizes += range(sizes[-1] + step, limit + 1, step)
    return [*(size for size in sizes if size < max_num_tokens), max_num_tokens]


def next_size(sizes: Sequence[int], number: int) -> int:
    """Return the smallest of rising sizes that is at least `number`."""
    return sizes[bisect_left(sizes, number)]
