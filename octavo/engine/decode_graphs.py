"""CUDA graphs of decode steps: one launch replays a whole step, so that Python no longer paces the GPU."""

import numpy as np
import torch
from torch import Tensor

from octavo.attention import AttentionMetadata, KVCache
from octavo.engine.step_input import StepInput
from octavo.models import Decoder


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: powers of two up to 16, then every 16. A batch runs in the next size."""
    sizes = [size for size in (1, 2, 4, 8) if size < max_num_seqs]
    return [*sizes, *range(16, max_num_seqs, 16), max_num_seqs]


class DecodeGraphs:
    """Runs steps in which every sequence has one new token. A size's graph is captured on first use.

    All graphs read the same device buffers, which one copy per step fills. Rows beyond the batch are dead:
    sequence length 0, slot -1.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """Allocate the buffers.

        Args:
            decoder: the network.
            kv_cache: its cache.
            max_num_seqs: largest batch.
            max_model_len: longest sequence, tokens.
            device: a CUDA device.
        """
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._max_model_len = max_model_len
        self._sizes = ladder(max_num_seqs)
        self._num_columns = -(-max_model_len // kv_cache.block_size)
        # Rows: input ids, positions, slots, sequence lengths.
        self._rows_host = torch.zeros((4, max_num_seqs), dtype=torch.int32, pin_memory=True)
        self._table_host = torch.zeros((max_num_seqs, self._num_columns), dtype=torch.int32, pin_memory=True)
        self._rows = torch.zeros((4, max_num_seqs), dtype=torch.int32, device=device)
        self._table = torch.zeros((max_num_seqs, self._num_columns), dtype=torch.int32, device=device)
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, step_input: StepInput) -> tuple[Tensor, Tensor]:
        """Replay a step.

        Args:
            step_input: S sequences with one new token each.

        Returns:
            (logits [S, V], positions [S] int32): views that the next call overwrites.
        """
        num_seqs = step_input.seq_lens.shape[0]
        size = self._size_for(num_seqs)
        self._fill(step_input, num_seqs, size)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[:num_seqs], self._rows[1, :num_seqs]

    def replay_us(self, num_seqs: int, repeat: int = 30) -> float:
        """Median GPU microseconds of the graph that a batch runs in, replayed on the last step's inputs."""
        graph, _ = self._graphs[self._size_for(num_seqs)]
        times = []
        for _ in range(repeat):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000)
        return sorted(times)[repeat // 2]

    def _size_for(self, num_seqs: int) -> int:
        return next(size for size in self._sizes if size >= num_seqs)

    def _fill(self, step_input: StepInput, num_seqs: int, size: int) -> None:
        rows, table = self._rows_host.numpy(), self._table_host.numpy()
        rows[:, num_seqs:size] = np.array([[0], [0], [-1], [0]])
        rows[0, :num_seqs] = step_input.input_ids
        rows[1, :num_seqs] = step_input.positions
        rows[2, :num_seqs] = step_input.slot_mapping
        rows[3, :num_seqs] = step_input.seq_lens
        table[:num_seqs, : step_input.block_table.shape[1]] = step_input.block_table
        self._rows.copy_(self._rows_host, non_blocking=True)
        self._table[:num_seqs].copy_(self._table_host[:num_seqs], non_blocking=True)

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Compiles kernels and sizes workspaces, which a capture must not do.
            self._forward(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._forward(size)
        return graph, logits

    def _forward(self, size: int) -> Tensor:
        input_ids, positions, slots, seq_lens = self._rows[:, :size]
        metadata = AttentionMetadata(
            cu_seqlens_q=self._starts[: size + 1],
            seq_lens=seq_lens,
            positions=positions,
            slot_mapping=slots,
            block_table=self._table[:size],
            max_query_len=1,
            max_seq_len=self._max_model_len,
        )
        hidden = self._decoder.forward(input_ids, positions, self._kv_cache, metadata)
        return self._decoder.compute_logits(hidden)
