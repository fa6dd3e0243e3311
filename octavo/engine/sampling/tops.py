"""The most likely tokens of a row of logits, with their log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.device import has_triton
from octavo.sampling_params import MAX_LOGPROBS

# (token id, log-probability, rank) of the most likely tokens and of the row's own token.
Top = list[tuple[int, float, int]]

# More rows are handled in parts of this size, so that their copies stay small.
ROWS_AT_ONCE = 16


def log_softmax(logits: Tensor) -> Tensor:
    """Return the [R, V] float32 log-probabilities of [R, V] logits; on a GPU each row by itself."""
    if has_triton(logits):
        from octavo.engine.sampling import triton_logprobs

        return triton_logprobs.log_softmax(logits)
    return logits.float().log_softmax(-1)


@dataclass(frozen=True, slots=True)
class Tops:
    """The most likely tokens of some rows, on their way to the host.

    Attributes:
        nums: how many each row wants.
        packed: rows as pack_tops makes them, for the largest of nums.
    """

    nums: Sequence[int]
    packed: Tensor

    def read(self) -> list[Top]:
        """Return each row's list; on a GPU the copy must have arrived."""
        tops = []
        most = (self.packed.shape[1] - 3) // 2
        for num, (own, own_value, own_rank, *best) in zip(self.nums, self.packed.tolist(), strict=True):
            ids = [int(token_id) for token_id in best[:num]]
            top = list(zip(ids, best[most : most + num], range(1, num + 1), strict=True))
            tops.append(top if own in ids else [*top, (int(own), own_value, int(own_rank))])
        return tops


def pack_tops(logprobs: Tensor, own: Tensor, num: int) -> Tensor:
    """Find each row's most likely tokens, and its own; waits for no device.

    Args:
        logprobs: [R, V] float32 log-probabilities.
        own: [R] int64 tokens that were sampled (or stand in the prompt), on the device.
        num: how many of the most likely tokens are wanted.

    Returns:
        [R, 3 + 2 num] float64, which holds every token id: own token, its log-probability and rank, most
        likely tokens, their log-probabilities; less where the vocabulary is smaller.
    """
    # The number never changes: PyTorch has other kernels for other numbers, and loads each on first use.
    best = _most_likely_ids(logprobs, min(MAX_LOGPROBS, logprobs.shape[1]))[:, :num]
    own = own[:, None]
    value = logprobs.gather(1, own)
    rank = (logprobs > value).sum(1, keepdim=True) + 1
    return torch.cat([x.double() for x in (own, value, rank, best, logprobs.gather(1, best))], dim=1)


def _most_likely_ids(logprobs: Tensor, num: int) -> Tensor:
    """Return [R, num] ids by falling log-probability, ties by rising id, which topk does not promise."""
    # No log-probability is positive: without the sign its bits, an integer, grow as it falls.
    keys = (logprobs.view(torch.int32) & 0x7FFFFFFF).long()
    keys.bitwise_left_shift_(32).bitwise_or_(torch.arange(logprobs.shape[1], device=logprobs.device))
    return keys.topk(num, largest=False).values & 0xFFFFFFFF
