"""CUDA graphs of decode steps: one launch replays a step, from the tokens in the rows to the next ones."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.engine.gpu.graphs import CapturedNetwork, StepGraphs
from octavo.engine.gpu.rows import DeviceRows
from octavo.gpu.copies import to_device


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: powers of two up to 16, every 16, from 256 on every 32.

    A batch runs in the next size.
    """
    sizes = [1, 2, 4, 8, *range(16, 256, 16), *range(256, max_num_seqs, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


@dataclass(frozen=True, slots=True)
class Variant:
    """What one graph runs.

    Attributes:
        size: sequences of its batch, padding included.
        samples: the graph samples and moves the rows on; else it ends with the logits.
        filters: some row asks for top-k, top-p or min-p.
        shares: rows have prefixes in common.
    """

    size: int
    samples: bool
    filters: bool
    shares: bool


class DecodeGraphs(StepGraphs[Variant, Tensor]):
    """Runs steps in which every sequence has one new token.

    All graphs read the same buffers. A batch is padded to its graph's size; padding is dead: row -1, sequence
    length 0, slot -1.
    """

    warms_up = True

    def __init__(self, network: CapturedNetwork, rows: DeviceRows) -> None:
        """Allocate the buffers.

        Args:
            network: what a step runs.
            rows: the sequences' state; its number of rows is the largest batch.
        """
        super().__init__()
        self._network = network
        self._state = rows
        max_num_seqs = rows.tokens.shape[0]
        self._sizes = ladder(max_num_seqs)
        self._rows = torch.full((max_num_seqs,), -1, dtype=torch.int32, device=network.device)
        # Input ids, positions, slots, sequence lengths.
        self._step = torch.zeros((4, max_num_seqs), dtype=torch.int32, device=network.device)
        self._table = torch.zeros_like(rows.table)
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=network.device)
        self._outcome = torch.zeros(max_num_seqs, dtype=torch.int32, device=network.device)

    def set_batch(self, rows: list[int]) -> None:
        """Send the rows that the next steps run to the device."""
        padded = np.full(self._size_for(len(rows)), -1, dtype=np.int32)
        padded[: len(rows)] = rows
        self._rows[: len(padded)].copy_(to_device(padded, self._network.device))

    def decode(self, num_seqs: int, *, shares: bool, filters: bool) -> Tensor:
        """Run a step and sample.

        Args:
            num_seqs: S, rows of the batch.
            shares: the forest holds a plan of this batch.
            filters: some request asks for top-k, top-p or min-p.

        Returns:
            [S] int32 token ids, -1 where logits were not finite: a view that the next step overwrites.
        """
        size = self._size_for(num_seqs)
        return self._replay(Variant(size, samples=True, filters=filters, shares=shares))[:num_seqs]

    def logits(self, num_seqs: int, *, shares: bool) -> Tensor:
        """Run a step up to its logits, [S, V]: a view that the next step overwrites. The rows stay."""
        size = self._size_for(num_seqs)
        return self._replay(Variant(size, samples=False, filters=False, shares=shares))[:num_seqs]

    def _size_for(self, num_seqs: int) -> int:
        return next(size for size in self._sizes if size >= num_seqs)

    def _warm_up(self, variant: Variant) -> None:
        """Launch a variant's kernels for a batch that is all padding: no row and no cache slot changes."""
        batch = self._rows.clone()
        self._rows.fill_(-1)
        self._run(variant)
        self._rows.copy_(batch)

    def _run(self, variant: Variant) -> Tensor:
        rows = self._rows[: variant.size]
        logits = self._logits(rows, shares=variant.shares)
        return self._sample(logits, rows, filters=variant.filters) if variant.samples else logits

    def _logits(self, rows: Tensor, *, shares: bool) -> Tensor:
        from octavo.engine.gpu.row_kernels import gather_rows

        network, state, size = self._network, self._state, rows.shape[0]
        step = self._step[:, :size]
        block_size = network.kv_cache.block_size
        gather_rows(rows, state.tokens, state.positions, state.table, step, self._table, block_size)
        input_ids, positions, slots, seq_lens = step
        starts, table = self._starts[: size + 1], self._table[:size]
        hidden = network.forward(
            *(input_ids, positions, slots, starts, seq_lens, table), max_query_len=1, shares=shares
        )
        return network.decoder.compute_logits(hidden)

    def _sample(self, logits: Tensor, rows: Tensor, *, filters: bool) -> Tensor:
        from octavo.engine.gpu.row_kernels import advance_rows

        state, positions = self._state, self._step[1, : rows.shape[0]]
        sampled, is_finite = state.sample(logits, rows, positions, filters=filters)
        outcome = self._outcome[: rows.shape[0]]
        advance_rows(rows, sampled, is_finite, state.tokens, state.positions, outcome)
        return outcome
