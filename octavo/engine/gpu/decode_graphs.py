"""CUDA graphs of decode steps: one launch replays a whole step, from the rows' tokens to their next ones."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.attention import AttentionMetadata, DeviceForest, KVCache
from octavo.engine.gpu.rows import DeviceRows
from octavo.gpu.copies import to_device
from octavo.models import Decoder


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: powers of two up to 16, every 16, from 256 on every 32.

    A batch runs in the next size.
    """
    sizes = [1, 2, 4, 8, *range(16, 256, 16), *range(256, max_num_seqs, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


@dataclass(frozen=True, slots=True)
class Variant:
    """What a graph does.

    Attributes:
        size: places of its batch.
        samples: it samples and moves the rows on; else it ends with the logits.
        filters: some row asks for top-k, top-p or min-p.
        shares: rows have prefixes in common.
    """

    size: int
    samples: bool
    filters: bool
    shares: bool


class DecodeGraphs:
    """Runs steps in which every sequence has one new token. A variant's graph is captured on first use.

    All graphs read the same buffers. Places beyond the batch are dead: row -1, sequence length 0, slot -1.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        rows: DeviceRows,
        forest: DeviceForest | None,
        *,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """Allocate the buffers.

        Args:
            decoder: the network.
            kv_cache: its cache.
            rows: the sequences' state; its number of rows is the largest batch.
            forest: what they have in common, where graphs are asked to share; None: they never are.
            max_model_len: longest sequence, tokens.
            device: a CUDA device.
        """
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._state = rows
        self._forest = forest
        self._max_model_len = max_model_len
        self._device = device
        max_num_seqs = rows.tokens.shape[0]
        self._sizes = ladder(max_num_seqs)
        self._rows = torch.full((max_num_seqs,), -1, dtype=torch.int32, device=device)
        # Input ids, positions, slots, sequence lengths.
        self._step = torch.zeros((4, max_num_seqs), dtype=torch.int32, device=device)
        self._table = torch.zeros_like(rows.table)
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._outcome = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._graphs: dict[Variant, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def set_batch(self, rows: list[int]) -> None:
        """Say which rows the next steps run."""
        padded = np.full(self._size_for(len(rows)), -1, dtype=np.int32)
        padded[: len(rows)] = rows
        self._rows[: len(padded)].copy_(to_device(padded, self._device))

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

    def _replay(self, variant: Variant) -> Tensor:
        if variant not in self._graphs:
            self._graphs[variant] = self._capture(variant)
        graph, result = self._graphs[variant]
        graph.replay()
        return result

    def _capture(self, variant: Variant) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Record a graph, after a run on dead rows that compiles kernels and sizes workspaces."""
        batch = self._rows.clone()
        self._rows.fill_(-1)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(variant)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = self._run(variant)
        self._rows.copy_(batch)
        return graph, result

    def _run(self, variant: Variant) -> Tensor:
        from octavo.engine.gpu.row_kernels import gather_rows

        state, size = self._state, variant.size
        rows, step = self._rows[:size], self._step[:, :size]
        gather_rows(
            *(rows, state.tokens, state.positions, state.table, step, self._table, self._kv_cache.block_size)
        )
        logits = self._forward(size, self._forest if variant.shares else None)
        return self._sample(logits, rows, filters=variant.filters) if variant.samples else logits

    def _forward(self, size: int, forest: DeviceForest | None) -> Tensor:
        input_ids, positions, slots, seq_lens = self._step[:, :size]
        metadata = AttentionMetadata(
            cu_seqlens_q=self._starts[: size + 1],
            seq_lens=seq_lens,
            positions=positions,
            slot_mapping=slots,
            block_table=self._table[:size],
            max_query_len=1,
            max_seq_len=self._max_model_len,
            work=forest,
        )
        hidden = self._decoder.forward(input_ids, self._kv_cache, metadata)
        return self._decoder.compute_logits(hidden)

    def _sample(self, logits: Tensor, rows: Tensor, *, filters: bool) -> Tensor:
        from octavo.engine.gpu.row_kernels import advance_rows

        state, positions = self._state, self._step[1, : rows.shape[0]]
        sampled, is_finite = state.sample(logits, rows, positions, filters=filters)
        outcome = self._outcome[: rows.shape[0]]
        advance_rows(rows, sampled, is_finite, state.tokens, state.positions, outcome)
        return outcome
