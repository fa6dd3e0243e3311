"""CUDA graphs of steps with prompts under way: one launch replays the network over all their tokens.

Launched one by one, the few hundred kernels of such a step cost the host more time than the device.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.attention import AttentionMetadata, DeviceForest, KVCache
from octavo.engine.step_input import StepInput
from octavo.gpu.copies import copy_to, to_device
from octavo.gpu.device import power_of_two
from octavo.layers.steps.dense import MIN_TOKENS
from octavo.models import Decoder

_FINEST = 16


def padded_size(num_tokens: int, max_num_tokens: int) -> int:
    """Return the tokens that a step of num_tokens >= 1 is padded to: at most an eighth more, or 15."""
    step = max(_FINEST, power_of_two(num_tokens) // 16)
    return min(max_num_tokens, -(-num_tokens // step) * step)


class MixedVariant(NamedTuple):
    """What a graph does.

    Attributes:
        size: tokens, padded.
        shares: sequences have prefixes in common.
        is_fresh: see AttentionMetadata.
    """

    size: int
    shares: bool
    is_fresh: bool


class MixedGraphs:
    """Runs the network over ragged batches. A variant's graph is captured on first use.

    All graphs read the same buffers and leave their result in one. Tokens beyond the step's belong to no
    sequence and have slot -1; sequences beyond its own have no tokens.

        _step   input ids [T] | positions [T] | slots [T] | cu_seqlens_q [S + 1] | seq_lens [S]
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        forest: DeviceForest | None,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """Allocate the buffers.

        Args:
            decoder: the network.
            kv_cache: its cache.
            forest: what sequences have in common, where steps are said to share; None: they never do.
            max_num_seqs: S, most sequences of a step.
            max_num_tokens: T, most tokens of a step.
            max_model_len: longest sequence, tokens.
            device: a CUDA device.
        """
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._forest = forest
        self._max_model_len = max_model_len
        self._device = device
        self._sizes = [max_num_tokens] * 3 + [max_num_seqs + 1, max_num_seqs]
        self._step = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        num_columns = -(-max_model_len // kv_cache.block_size)
        self._table = torch.zeros(max_num_seqs, num_columns, dtype=torch.int32, device=device)
        shape = (max_num_tokens, decoder.config.hidden_size)
        self._hidden = torch.zeros(shape, dtype=decoder.dtype, device=device)
        self.graphs: dict[MixedVariant, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def load(self, step: StepInput) -> Tensor:
        """Send a step to the device; returns its input ids there, [tokens] int32, which may be changed."""
        num_tokens, num_seqs = step.input_ids.shape[0], step.seq_lens.shape[0]
        host = np.zeros(self._step.shape[0], dtype=np.int32)
        input_ids, positions, slots, starts, seq_lens = np.split(host, np.cumsum(self._sizes[:-1]))
        input_ids[:num_tokens] = step.input_ids
        positions[:num_tokens] = step.positions
        slots[:] = -1
        slots[:num_tokens] = step.slot_mapping
        starts[:] = num_tokens
        starts[: num_seqs + 1] = step.cu_seqlens_q
        seq_lens[:num_seqs] = step.seq_lens
        copy_to(self._step, host)
        table = to_device(step.block_table, self._device)
        self._table[:num_seqs, : table.shape[1]].copy_(table)
        return self._step[:num_tokens]

    def forward(self, num_tokens: int, *, shares: bool, is_fresh: bool) -> Tensor:
        """Run the step that was loaded.

        Args:
            num_tokens: its tokens.
            shares: the forest holds a plan of it.
            is_fresh: see AttentionMetadata.

        Returns:
            [num_tokens, hidden] as Decoder.forward: a view that the next step overwrites.
        """
        size = padded_size(num_tokens, self._hidden.shape[0])
        variant = MixedVariant(size, shares, is_fresh and size >= MIN_TOKENS)
        if variant not in self.graphs:
            self.graphs[variant] = self._capture(variant)
        self.graphs[variant].replay()
        return self._hidden[:num_tokens]

    def _capture(self, variant: MixedVariant) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Kernels may be compiled and loaded meanwhile, which the strict modes forbid.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="relaxed"):
            self._run(variant)
        return graph

    def _run(self, variant: MixedVariant) -> None:
        size = variant.size
        input_ids, positions, slots, starts, seq_lens = self._step.split(self._sizes)
        metadata = AttentionMetadata(
            cu_seqlens_q=starts,
            seq_lens=seq_lens,
            positions=positions[:size],
            slot_mapping=slots[:size],
            block_table=self._table,
            max_query_len=size,
            max_seq_len=self._max_model_len,
            work=self._forest if variant.shares else None,
            is_fresh=variant.is_fresh,
        )
        hidden = self._decoder.forward(input_ids[:size], self._kv_cache, metadata)
        self._hidden[:size].copy_(hidden)
