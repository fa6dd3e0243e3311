"""CUDA graphs of decode steps: the network over the tokens that the device's rows hold."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from octavo.engine.gpu.buffers import StepBuffers
from octavo.engine.gpu.device_rows import DeviceRows
from octavo.engine.gpu.graphs import CapturedNetwork, GraphPool, StepGraphs
from octavo.engine.gpu.sizes import next_size, sequence_sizes


class DecodeVariant(NamedTuple):
    """What one graph runs.

    Attributes:
        size: sequences of its batch, padding included.
        shares: rows have prefixes in common.
    """

    size: int
    shares: bool


class DecodeGraphs(StepGraphs[DecodeVariant]):
    """Runs the network over steps in which every sequence has one new token.

    A batch is padded to its graph's size. Padding has row -1, sequence length 0 and slot -1.
    """

    def __init__(
        self, pool: GraphPool, network: CapturedNetwork, state: DeviceRows, buffers: StepBuffers
    ) -> None:
        """Allocate the block table; the number of rows is the largest batch."""
        super().__init__(pool, network, state, buffers)
        max_num_seqs, device = state.tokens.shape[0], state.table.device
        self._sizes = sequence_sizes(max_num_seqs)
        self._table = torch.zeros_like(state.table)
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)

    def variants(self) -> Iterator[DecodeVariant]:
        """See StepGraphs."""
        for size in reversed(self._sizes):
            yield DecodeVariant(size, shares=False)
            # A single sequence has no other to share with.
            if self.network.forest is not None and size > 1:
                yield DecodeVariant(size, shares=True)

    def set_batch(self, rows: list[int]) -> None:
        """Send the rows that the next steps run to the device."""
        self.buffers.set_decoding(rows, next_size(self._sizes, len(rows)))

    def run(self, num_seqs: int, *, shares: bool) -> None:
        """Run a step of S sequences; the first S rows of `last` are theirs.

        Args:
            num_seqs: S, rows of the batch.
            shares: the forest holds a plan of this batch.
        """
        self.replay(DecodeVariant(next_size(self._sizes, num_seqs), shares=shares))

    def launch(self, variant: DecodeVariant, network: CapturedNetwork) -> None:
        """See StepGraphs."""
        from octavo.engine.gpu.row_kernels import gather_rows

        state, size = self.state, variant.size
        step = self.buffers.decode_inputs[:, :size]
        block_size = network.kv_cache.block_size
        rows = self.buffers.rows[:size]
        gather_rows(rows, state.tokens, state.positions, state.table, step, self._table, block_size)
        positions, input_ids, slots, seq_lens = step
        hidden = network.forward(
            input_ids,
            positions,
            slots,
            cu_seqlens_q=self._starts[: size + 1],
            seq_lens=seq_lens,
            block_table=self._table[:size],
            max_query_len=1,
            shares=variant.shares,
            # A row's last token was sampled in an earlier step, so all keys before it were stored by then.
            keys_are_old=True,
        )
        self.buffers.last[:size].copy_(hidden)
