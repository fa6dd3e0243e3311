"""CUDA graphs of mixed steps, with prompts under way: one launch replays the network over all their tokens.

Launching the few hundred kernels of such a step one by one takes the host longer than the device runs them.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.engine.gpu.buffers import StepBuffers
from octavo.engine.gpu.graphs import CapturedNetwork, GraphPool, StepGraphs
from octavo.engine.gpu.rows import DeviceRows
from octavo.engine.gpu.sizes import next_size, token_sizes
from octavo.engine.step.input import StepInput
from octavo.kernels.copies import copy_to, to_device
from octavo.layers.steps.cudnn_prompt import MIN_TOKENS


class MixedVariant(NamedTuple):
    """What one graph runs.

    Attributes:
        size: tokens, padding included.
        shares: sequences have prefixes in common.
        is_fresh: see AttentionMetadata.
    """

    size: int
    shares: bool
    is_fresh: bool


class MixedGraphs(StepGraphs[MixedVariant]):
    """Runs the network over ragged batches.

    Tokens beyond the step's belong to no sequence and have slot -1; sequences beyond its own have no tokens.

        _step   input ids [T] | positions [T] | slots [T] | cu_seqlens_q [S + 1] | seq_lens [S]
    """

    def __init__(
        self, pool: GraphPool, network: CapturedNetwork, state: DeviceRows, buffers: StepBuffers
    ) -> None:
        """Allocate the inputs of S sequences, as many as there are rows, and of T tokens."""
        super().__init__(pool, network, state, buffers)
        max_num_seqs, max_num_tokens = state.tokens.shape[0], buffers.hidden.shape[0]
        self._sizes = token_sizes(max_num_tokens)
        self._fields = [max_num_tokens] * 3 + [max_num_seqs + 1, max_num_seqs]
        self._step = torch.zeros(sum(self._fields), dtype=torch.int32, device=state.table.device)
        self._table = torch.zeros_like(state.table)

    def variants(self) -> Iterator[MixedVariant]:
        """See StepGraphs."""
        for size in reversed(self._sizes):
            if size >= MIN_TOKENS:
                yield MixedVariant(size, shares=False, is_fresh=True)
            yield MixedVariant(size, shares=False, is_fresh=False)
            if self.network.forest is not None:
                yield MixedVariant(size, shares=True, is_fresh=False)

    def load(self, step: StepInput) -> Tensor:
        """Send a step to the device; returns its input ids there, [tokens] int32, which may be changed."""
        num_tokens, num_seqs = step.input_ids.shape[0], step.seq_lens.shape[0]
        host = np.zeros(self._step.shape[0], dtype=np.int32)
        input_ids, positions, slots, starts, seq_lens = np.split(host, np.cumsum(self._fields[:-1]))
        input_ids[:num_tokens] = step.input_ids
        positions[:num_tokens] = step.positions
        slots[:] = -1
        slots[:num_tokens] = step.slot_mapping
        starts[:] = num_tokens
        starts[: num_seqs + 1] = step.cu_seqlens_q
        seq_lens[:num_seqs] = step.seq_lens
        copy_to(self._step, host)
        table = to_device(step.block_table, self._table.device)
        self._table[:num_seqs, : table.shape[1]].copy_(table)
        return self._step[:num_tokens]

    def run(self, num_tokens: int, *, shares: bool, is_fresh: bool) -> Tensor:
        """Run the step that was loaded.

        Args:
            num_tokens: its tokens.
            shares: the forest holds a plan of it.
            is_fresh: see AttentionMetadata.

        Returns:
            [num_tokens, hidden] as Decoder.forward: a view that the next step overwrites.
        """
        size = next_size(self._sizes, num_tokens)
        self.replay(MixedVariant(size, shares, is_fresh and size >= MIN_TOKENS and not shares))
        return self.buffers.hidden[:num_tokens]

    def launch(self, variant: MixedVariant, network: CapturedNetwork) -> None:
        """See StepGraphs."""
        size = variant.size
        input_ids, positions, slots, starts, seq_lens = self._step.split(self._fields)
        hidden = network.forward(
            input_ids[:size],
            positions[:size],
            slots[:size],
            cu_seqlens_q=starts,
            seq_lens=seq_lens,
            block_table=self._table,
            max_query_len=size,
            shares=variant.shares,
            is_fresh=variant.is_fresh,
        )
        self.buffers.hidden[:size].copy_(hidden)
