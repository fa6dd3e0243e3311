"""CUDA graphs of mixed steps, with prompts under way: one launch replays the network over all their tokens.

Launching the few hundred kernels of such a step one by one takes the host longer than the device runs them.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.engine.gpu.graphs import CapturedNetwork, StepGraphs
from octavo.engine.step_input import StepInput
from octavo.gpu.copies import copy_to, to_device
from octavo.gpu.device import power_of_two
from octavo.layers.steps.dense import MIN_TOKENS

_FINEST = 16


def padded_size(num_tokens: int, max_num_tokens: int) -> int:
    """Return the tokens that a step of num_tokens >= 1 is padded to: at most an eighth more, or 15."""
    step = max(_FINEST, power_of_two(num_tokens) // 16)
    return min(max_num_tokens, -(-num_tokens // step) * step)


class MixedVariant(NamedTuple):
    """What one graph runs.

    Attributes:
        size: tokens, padded.
        shares: sequences have prefixes in common.
        is_fresh: see AttentionMetadata.
    """

    size: int
    shares: bool
    is_fresh: bool


class MixedGraphs(StepGraphs[MixedVariant, None]):
    """Runs the network over ragged batches. No warm-up: it would cost as much as the step itself.

    All graphs read the same buffers and leave their result in one. Tokens beyond the step's belong to no
    sequence and have slot -1; sequences beyond its own have no tokens.

        _step   input ids [T] | positions [T] | slots [T] | cu_seqlens_q [S + 1] | seq_lens [S]
    """

    def __init__(self, network: CapturedNetwork, *, max_num_seqs: int, max_num_tokens: int) -> None:
        """Allocate the buffers.

        Args:
            network: what a step runs.
            max_num_seqs: S, most sequences of a step.
            max_num_tokens: T, most tokens of a step.
        """
        super().__init__()
        self._network = network
        self._sizes = [max_num_tokens] * 3 + [max_num_seqs + 1, max_num_seqs]
        self._step = torch.zeros(sum(self._sizes), dtype=torch.int32, device=network.device)
        table = (max_num_seqs, network.max_num_blocks)
        self._table = torch.zeros(table, dtype=torch.int32, device=network.device)
        decoder = network.decoder
        hidden = (max_num_tokens, decoder.config.hidden_size)
        self._hidden = torch.zeros(hidden, dtype=decoder.dtype, device=network.device)

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
        table = to_device(step.block_table, self._network.device)
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
        self._replay(variant)
        return self._hidden[:num_tokens]

    def _run(self, variant: MixedVariant) -> None:
        size = variant.size
        input_ids, positions, slots, starts, seq_lens = self._step.split(self._sizes)
        hidden = self._network.forward(
            *(input_ids[:size], positions[:size], slots[:size], starts, seq_lens, self._table),
            max_query_len=size,
            shares=variant.shares,
            is_fresh=variant.is_fresh,
        )
        self._hidden[:size].copy_(hidden)
