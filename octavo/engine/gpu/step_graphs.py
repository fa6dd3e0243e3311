"""The three kinds of CUDA graphs: mixed steps, decode steps, and sampling.

A mixed step has prompts in it. Launching its few hundred kernels one by one takes the host longer than the
device runs them, so one launch replays the network over all its tokens.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.engine.gpu.graphs import (
    CapturedNetwork,
    StepGraphs,
    next_size,
    sequence_sizes,
    token_sizes,
)
from octavo.engine.step.step_input import StepInput
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

        _step   input ids [T] | positions [T] | cu_seqlens_q [S + 1] | seq_lens [S] | slots [T] of each group
    """

    def allocate(self) -> None:
        """See StepGraphs: the inputs of S sequences, as many as there are rows, and of T tokens."""
        max_num_seqs, max_num_tokens = self.state.tokens.shape[0], self.buffers.hidden.shape[0]
        self._sizes = token_sizes(max_num_tokens)
        tables = self.state.tables
        self._fields = (
            [max_num_tokens] * 2 + [max_num_seqs + 1, max_num_seqs] + [max_num_tokens] * len(tables)
        )
        self._step = torch.zeros(sum(self._fields), dtype=torch.int32, device=tables.device)
        self._tables = torch.zeros_like(tables)

    def variants(self) -> Iterator[MixedVariant]:
        """See StepGraphs."""
        for size in reversed(self._sizes):
            if size >= MIN_TOKENS:
                yield MixedVariant(size, shares=False, is_fresh=True)
            yield MixedVariant(size, shares=False, is_fresh=False)
            if self.network.can_share:
                yield MixedVariant(size, shares=True, is_fresh=False)

    def load(self, step: StepInput) -> Tensor:
        """Send a step to the device; returns its input ids there, [tokens] int32, which may be changed."""
        num_tokens, num_seqs = step.input_ids.shape[0], step.seq_lens.shape[0]
        host = np.zeros(self._step.shape[0], dtype=np.int32)
        input_ids, positions, starts, seq_lens, *slots = np.split(host, np.cumsum(self._fields[:-1]))
        input_ids[:num_tokens] = step.input_ids
        positions[:num_tokens] = step.positions
        for own, group in zip(slots, step.groups, strict=True):
            own[:] = -1
            own[:num_tokens] = group.slot_mapping
        starts[:] = num_tokens
        starts[: num_seqs + 1] = step.cu_seqlens_q
        seq_lens[:num_seqs] = step.seq_lens
        copy_to(self._step, host)
        for table, group in zip(self._tables, step.groups, strict=True):
            sent = to_device(group.block_table, table.device)
            table[:num_seqs, : sent.shape[1]].copy_(sent)
        return self._step[:num_tokens]

    def run(self, num_tokens: int, *, shares: bool, is_fresh: bool) -> Tensor:
        """Run the step that was loaded.

        Args:
            num_tokens: its tokens.
            shares: the forests hold plans of it.
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
        input_ids, positions, starts, seq_lens, *slots = self._step.split(self._fields)
        hidden = network.forward(
            input_ids[:size],
            positions[:size],
            [(own[:size], table) for own, table in zip(slots, self._tables, strict=True)],
            cu_seqlens_q=starts,
            seq_lens=seq_lens,
            max_query_len=size,
            shares=variant.shares,
            is_fresh=variant.is_fresh,
        )
        self.buffers.hidden[:size].copy_(hidden)


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

    def allocate(self) -> None:
        """See StepGraphs: the block tables; the number of rows is the largest batch."""
        max_num_seqs, device = self.state.tokens.shape[0], self.state.tokens.device
        self._sizes = sequence_sizes(max_num_seqs)
        self._tables = torch.zeros_like(self.state.tables)
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)

    def variants(self) -> Iterator[DecodeVariant]:
        """See StepGraphs."""
        for size in reversed(self._sizes):
            yield DecodeVariant(size, shares=False)
            # A single sequence has no other to share with.
            if self.network.can_share and size > 1:
                yield DecodeVariant(size, shares=True)

    def set_batch(self, rows: list[int]) -> None:
        """Send the rows that the next steps run to the device."""
        self.buffers.set_decoding(rows, next_size(self._sizes, len(rows)))

    def run(self, num_seqs: int, *, shares: bool) -> None:
        """Run a step of S sequences; the first S rows of `last` are theirs.

        Args:
            num_seqs: S, rows of the batch.
            shares: the forests hold plans of this batch.
        """
        self.replay(DecodeVariant(next_size(self._sizes, num_seqs), shares=shares))

    def launch(self, variant: DecodeVariant, network: CapturedNetwork) -> None:
        """See StepGraphs."""
        from octavo.engine.gpu.row_kernels import gather_rows

        state, size = self.state, variant.size
        steps = self.buffers.decode_inputs[:, :, :size]
        block_size = network.kv_cache.block_size
        rows = self.buffers.rows[:size]
        gather_rows(rows, state.tokens, state.positions, state.tables, steps, self._tables, block_size)
        positions, input_ids, _, seq_lens = steps[0]
        groups = [(own[2], table[:size]) for own, table in zip(steps, self._tables, strict=True)]
        hidden = network.forward(
            input_ids,
            positions,
            groups,
            cu_seqlens_q=self._starts[: size + 1],
            seq_lens=seq_lens,
            max_query_len=1,
            shares=variant.shares,
            # A row's last token was sampled in an earlier step, so all keys before it were stored by then.
            keys_are_old=True,
        )
        self.buffers.last[:size].copy_(hidden)


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

    def allocate(self) -> None:
        """See StepGraphs: the logits come later, when their width and dtype are known."""
        self._sizes = sequence_sizes(self.state.tokens.shape[0])
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
