"""CUDA graphs that sample: from hidden states to tokens in the device's rows."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.engine.gpu.buffers import StepBuffers
from octavo.engine.gpu.device_rows import DeviceRows
from octavo.engine.gpu.graphs import CapturedNetwork, GraphPool, StepGraphs
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
        self, pool: GraphPool, network: CapturedNetwork, state: DeviceRows, buffers: StepBuffers
    ) -> None:
        super().__init__(pool, network, state, buffers)
        self._sizes = sequence_sizes(state.tokens.shape[0])
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
        return self.buffers.outcome[:num_seqs]

    def launch(self, variant: SamplingVariant, network: CapturedNetwork) -> None:
        """See StepGraphs."""
        size, buffers = variant.size, self.buffers
        rows, positions = buffers.rows[:size], buffers.positions[:size]
        logits = network.decoder.compute_logits(buffers.last[:size])
        if variant.keeps:
            self._kept(logits)[:size].copy_(logits)
        self.state.sample(logits, rows, positions, buffers.outcome, filters=variant.filters)

    def _kept(self, logits: Tensor) -> Tensor:
        if self.logits.dtype != logits.dtype or not self.logits.numel():
            shape = (self.buffers.rows.shape[0], logits.shape[1])
            self.logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        return self.logits
