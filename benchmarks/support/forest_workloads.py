"""Batches of sequences that share prefixes, as levels of a forest, and the block tables they make."""

from dataclasses import dataclass

import numpy as np

BLOCK_SIZE, HEAD_DIM = 64, 128


@dataclass(frozen=True, slots=True)
class Workload:
    """One query token for each of some sequences that share tokens.

    Attributes:
        name: for the table.
        levels: (nodes, tokens of each) from the root to the sequences' own parts; every node has equally
            many of the next level below it.
        heads, kv_heads, head_dim: H, KH and D.
        window: a sequence sees its last `window` tokens; None: all.
    """

    name: str
    levels: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int = HEAD_DIM
    window: int | None = None

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.levels[-1][0]

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return sum(num_tokens for _, num_tokens in self.levels)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values in bfloat16 that sequences see, shared ones counted once."""
        num_seen, left = 0, self.seen_len
        for count, num_tokens in reversed(self.levels):
            num_seen += count * min(num_tokens, left)
            left -= min(num_tokens, left)
        return num_seen * self.kv_heads * self.head_dim * 4

    @property
    def seen_len(self) -> int:
        """Tokens that a sequence sees."""
        return min(self.seq_len, self.window or self.seq_len)

    @property
    def flops(self) -> int:
        """Floating-point operations of both products."""
        return 4 * self.batch * self.seen_len * self.heads * self.head_dim


GOALS = (
    Workload("256 x (4096 + 128) 16/8", ((1, 4096), (256, 128)), 16, 8),
    Workload("64 x (8192 + 256) 32/8", ((1, 8192), (64, 256)), 32, 8),
    Workload("16 x (4096 + 256) 32/8", ((1, 4096), (16, 256)), 32, 8),
)
WORKLOADS = (
    *GOALS,
    Workload("64 prompts x 8 samples (1024 + 256) 16/8", ((64, 1024), (512, 256)), 16, 8),
    Workload("8 documents x 8 questions (2048 + 1024 + 128) 16/8", ((1, 2048), (8, 1024), (64, 128)), 16, 8),
    Workload("256 x (4096 + 64) 64/8 D 64 window 128", ((1, 4096), (256, 64)), 64, 8, 64, 128),
    Workload("256 x (4096 + 128) 16/8 D 256 window 1024", ((1, 4096), (256, 128)), 16, 8, 256, 1024),
    Workload("64 x (8192 + 256) 32/8 window 4096", ((1, 8192), (64, 256)), 32, 8, HEAD_DIM, 4096),
)


def make_block_tables(workload: Workload) -> np.ndarray:
    """Deal shuffled blocks to nodes, and to each sequence those of its nodes: [S, blocks] int32."""
    num_blocks = sum(count * num_tokens for count, num_tokens in workload.levels) // BLOCK_SIZE
    ids = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    columns, begin = [], 0
    for count, num_tokens in workload.levels:
        end = begin + count * num_tokens // BLOCK_SIZE
        nodes = ids[begin:end].reshape(count, -1)
        columns.append(nodes.repeat(workload.batch // count, axis=0))
        begin = end
    return np.concatenate(columns, axis=1)
