"""What the graphs of a step hand to one another, on the device, always at the same addresses."""

from collections.abc import Sequence

import numpy as np
import torch

from octavo.engine.memory import ExecutionPlan
from octavo.kernels.copies import copy_to, to_device
from octavo.models import Decoder


class StepBuffers:
    """Inputs and results that graphs share.

        decode graph    tokens ----> last [S, width]
        mixed graph     tokens ----> hidden [T, width], of which `select` takes last
        sampling graph  last, rows, positions ----> outcome [S]

    Attributes:
        rows: [S] int32, device row of each sequence that samples; -1: padding.
        positions: [S] int32, position of the token that its row of `last` was computed from.
        decode_inputs: [4, S] int32: positions, the same tensor, then input ids, slots and sequence lengths
            of a decode step.
        hidden: [T, width] hidden states of a mixed step.
        last: [S, width] hidden states that tokens are sampled from.
        outcome: [S] int32 sampled token ids, -1 where logits were not finite.
    """

    def __init__(self, decoder: Decoder, plan: ExecutionPlan) -> None:
        """Allocate all of them.

        Args:
            decoder: makes the hidden states.
            plan: S, most sequences of a step, T, most tokens of a step, and a CUDA device.
        """
        max_num_seqs, device = plan.max_num_seqs, plan.device
        self._data = torch.zeros((6, max_num_seqs), dtype=torch.int32, device=device)
        self._data[0] = -1
        self.rows, self._places, self.positions = self._data[:3]
        self.decode_inputs = self._data[2:]
        shape = (plan.max_num_tokens, decoder.config.hidden_size)
        self.hidden = torch.zeros(shape, dtype=decoder.dtype, device=device)
        self.last = torch.zeros((max_num_seqs, shape[1]), dtype=decoder.dtype, device=device)
        self.outcome = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)

    def set_decoding(self, rows: Sequence[int], size: int) -> None:
        """Set the rows of decode steps, padded to `size`."""
        host = np.full(size, -1, dtype=np.int32)
        host[: len(rows)] = rows
        self.rows[:size].copy_(to_device(host, self._data.device))

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

    def select(self, num_seqs: int) -> None:
        """Take the hidden states of S sequences, as set_sampling placed them, from those of a mixed step."""
        torch.index_select(self.hidden, 0, self._places[:num_seqs], out=self.last[:num_seqs])
