"""CUDA graphs that sample: from hidden states to tokens in the device's rows."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.engine.gpu.buffers import StepBuffers
from octavo.engine.gpu.graphs import CapturedNetwork, GraphPool, StepGraphs
from octavo.engine.gpu.rows import DeviceRows
from octavo.engine.gpu.sizes import next_size, sequence_sizes


class SamplingVariant(NamedTuple):
    """What one graph runs.

    Attributes:
        size: sequences, padding included.
        filters: some row asks for top-k, top-p or min-p.
        keeps: logits are kept, for launches that follow the graph.
    """

    size: int
    filters: bool
    keeps: bool


class SamplingGraphs(StepGraphs[SamplingVariant]):
    """Runs the LM head over the hidden states that `buffers` names, samples, and moves the rows on.

    Attributes:
        logits: [S, V] those of the last step that kept them; empty until one did or was prepared.
    """

    def __init__(
        self, pool: GraphPool, network: CapturedNetwork, rows: DeviceRows, buffers: StepBuffers
    ) -> None:
        """Keep what all graphs read.

        Args:
            pool: of all graphs.
            network: its LM head.
            rows: the sequences' state.
            buffers: hidden states in, tokens out.
        """
        super().__init__(pool, network)
        self._state = rows
        self._buffers = buffers
        self._sizes = sequence_sizes(rows.tokens.shape[0])
        self.logits = torch.empty(0)

    def variants(self) -> Iterator[SamplingVariant]:
        """See StepGraphs."""
        for size in reversed(self._sizes):
            for filters in (False, True):
                for keeps in (False, True):
                    yield SamplingVariant(size, filters, keeps)

    def sample(self, num_seqs: int, *, filters: bool, keeps: bool) -> Tensor:
        """Sample for the first S rows of the buffers.

        Args:
            num_seqs: S.
            filters: some request asks for top-k, top-p or min-p.
            keeps: keep the logits, as `logits`.

        Returns:
            [S] int32 token ids, -1 where logits were not finite: a view that the next step overwrites.
        """
        self.replay(SamplingVariant(next_size(self._sizes, num_seqs), filters, keeps))
        return self._buffers.outcome[:num_seqs]

    def launch(self, variant: SamplingVariant, network: CapturedNetwork) -> None:
        """See StepGraphs."""
        from octavo.engine.gpu.row_kernels import advance_rows

        size, buffers, state = variant.size, self._buffers, self._state
        rows, positions = buffers.rows[:size], buffers.positions[:size]
        logits = network.decoder.compute_logits(buffers.hidden.index_select(0, buffers.places[:size]))
        if variant.keeps:
            self._kept(logits)[:size].copy_(logits)
        sampled, is_finite = state.sample(logits, rows, positions, filters=variant.filters)
        advance_rows(rows, sampled, is_finite, positions, state.tokens, state.positions, buffers.outcome)

    def _kept(self, logits: Tensor) -> Tensor:
        if self.logits.dtype != logits.dtype or not self.logits.numel():
            shape = (self._buffers.rows.shape[0], logits.shape[1])
            self.logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        return self.logits
