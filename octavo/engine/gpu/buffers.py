"""What the graphs of a step hand to one another, on the device, always at the same addresses."""

from collections.abc import Sequence

import numpy as np
import torch

from octavo.engine.memory import ExecutionPlan
from octavo.gpu.copies import copy_to, to_device
from octavo.models import Decoder


class StepBuffers:
    """Inputs and results that graphs share.

        network graph   tokens ----> hidden [T, width]
        sampling graph  hidden[places], rows, positions ----> outcome [S]

    Attributes:
        rows: [S] int32, device row of each sequence that samples; -1: padding.
        places: [S] int32, row of `hidden` that its token is sampled from.
        positions: [S] int32, position of the token that this row of `hidden` was computed from.
        decode_inputs: [4, S] int32: positions, the same tensor, then input ids, slots and sequence lengths
            of a decode step.
        hidden: [T, width] last hidden states.
        outcome: [S] int32 sampled token ids, -1 where logits were not finite.
    """

    def __init__(self, decoder: Decoder, plan: ExecutionPlan) -> None:
        """Allocate.

        Args:
            decoder: makes the hidden states.
            plan: S, most sequences of a step, T, most tokens of a step, and a CUDA device.
        """
        max_num_seqs, device = plan.max_num_seqs, plan.device
        self._data = torch.zeros((6, max_num_seqs), dtype=torch.int32, device=device)
        self._data[0] = -1
        self.rows, self.places, self.positions = self._data[:3]
        self.decode_inputs = self._data[2:]
        shape = (plan.max_num_tokens, decoder.config.hidden_size)
        self.hidden = torch.zeros(shape, dtype=decoder.dtype, device=device)
        self.outcome = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)

    def set_decoding(self, rows: Sequence[int], size: int) -> None:
        """Set the rows of decode steps, padded to `size`: the sequences' hidden states lie side by side."""
        host = np.full((2, size), -1, dtype=np.int32)
        host[0, : len(rows)] = rows
        host[1] = np.arange(size)
        self._data[:2, :size].copy_(to_device(host, self._data.device))

    def set_sampling(self, rows: Sequence[int], places: np.ndarray, ends: Sequence[int]) -> None:
        """Set the rows that sample in a mixed step.

        Args:
            rows: S device rows.
            places: [S] rows of `hidden`.
            ends: positions of the tokens to be sampled.
        """
        host = np.zeros((3, self._data.shape[1]), dtype=np.int32)
        host[0] = -1
        host[0, : len(rows)] = rows
        host[1, : len(rows)] = places
        host[2, : len(rows)] = np.array(ends) - 1
        copy_to(self._data[:3], host)
