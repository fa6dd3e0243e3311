"""Log-probabilities of prompt tokens, taken from each chunk of a prompt as a step computes it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from octavo.engine.request import Request
from octavo.engine.sampling.sampler import Tops, find_tops, log_softmax
from octavo.engine.scheduler import ScheduledRequest
from octavo.engine.step_result import PromptLogprobs
from octavo.gpu.copies import to_device
from octavo.models import Decoder

# Logits of prompt positions are computed in slices of at most this size.
_MAX_LOGITS_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log-probabilities of a chunk of a prompt, on their way to the host.

    Attributes:
        request: whose prompt.
        start: prompt position of the first.
        parts: what was found, slice after slice.
    """

    request: Request
    start: int
    parts: list[Tops]

    def read(self) -> PromptLogprobs:
        """Return the values; on a GPU the copies must have arrived."""
        return PromptLogprobs(self.request, self.start, [top for part in self.parts for top in part.read()])


def prompt_logprobs(
    decoder: Decoder, scheduled: Sequence[ScheduledRequest], hidden: Tensor
) -> list[PendingLogprobs]:
    """Find the prompt log-probabilities that a step yields: its token at position i predicts i + 1.

    Args:
        decoder: its LM head makes logits.
        scheduled: the step; requests without prompt_logprobs_start are passed over.
        hidden: [T, hidden size], the scheduled tokens' last hidden states, one after the other.
    """
    chunks = []
    begin = 0
    for item in scheduled:
        if item.request.prompt_logprobs_start is not None:
            chunks += _of_chunk(decoder, item, hidden[begin : begin + item.num_new_tokens])
        begin += item.num_new_tokens
    return chunks


def _of_chunk(decoder: Decoder, item: ScheduledRequest, hidden: Tensor) -> list[PendingLogprobs]:
    """The same for one request: row i of `hidden` predicts position item.start + i + 1."""
    request = item.request
    first = item.start + 1
    start = max(first, request.prompt_logprobs_start or 0)
    stop = min(item.end + 1, request.num_prompt_tokens)
    if start >= stop:
        return []
    num = request.params.prompt_logprobs or 0
    own = to_device(np.array(request.token_ids[start:stop], dtype=np.int64), hidden.device)
    wanted = hidden[start - first : stop - first]
    num_rows = max(1, _MAX_LOGITS_BYTES // (4 * decoder.config.vocab_size))
    parts = [
        find_tops(log_softmax(decoder.compute_logits(rows)), ids, [num] * len(ids))
        for rows, ids in zip(wanted.split(num_rows), own.split(num_rows), strict=True)
    ]
    return [PendingLogprobs(request, start, parts)]
