"""Log-probabilities of prompt tokens, taken from each chunk of a prompt as a step computes it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.engine.prompt_reader import ScoringParams
from octavo.engine.sampling.tops import Tops, log_softmax, pack_tops
from octavo.engine.step.result import PromptLogprobs
from octavo.engine.step.scheduled import ScheduledRequest
from octavo.kernels.copies import to_device, to_host
from octavo.models import Decoder

MAX_LOGITS_BYTES = 32 * 2**20
"""Logits of prompt positions are computed in slices of at most this size."""
_MAX_ROWS = 256


def prompt_logprobs(
    decoder: Decoder, scheduled: Sequence[ScheduledRequest], hidden: Tensor
) -> list[PromptLogprobs]:
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
            chunks += _chunk_logprobs(decoder, item, hidden[begin : begin + item.num_new_tokens])
        begin += item.num_new_tokens
    return chunks


def _chunk_logprobs(decoder: Decoder, item: ScheduledRequest, hidden: Tensor) -> list[PromptLogprobs]:
    """Find the log-probabilities of one request: row i of `hidden` predicts position item.start + i + 1."""
    request = item.request
    first = item.start + 1
    start = max(first, request.prompt_logprobs_start or 0)
    stop = min(item.end + 1, request.num_prompt_tokens)
    if start >= stop:
        return []
    num = request.params.prompt_logprobs or 0
    own = to_device(np.array(request.token_ids[start:stop], dtype=np.int64), hidden.device)
    wanted = hidden[start - first : stop - first]
    num_rows = max(1, min(_MAX_ROWS, MAX_LOGITS_BYTES // (4 * decoder.config.vocab_size)))
    packed, logprobs = [], hidden
    for rows, ids in zip(wanted.split(num_rows), own.split(num_rows), strict=True):
        logprobs = log_softmax(_logits(decoder, rows, num_rows))
        packed.append(pack_tops(logprobs, ids, num))
    found = [PromptLogprobs(request, start, Tops([num] * len(own), to_host(torch.cat(packed))))]
    rivals = request.params.rivals if isinstance(request.params, ScoringParams) else ()
    if rivals and stop == request.num_prompt_tokens:
        # They stand where the most likely tokens would, in a row that takes the place of the last one.
        ids = to_device(np.array(rivals, dtype=np.int64), hidden.device)
        row = torch.cat([packed[-1][-1, :3], ids.double(), logprobs[-1][ids].double()])
        found.append(PromptLogprobs(request, stop - 1, Tops([len(rivals)], to_host(row[None]))))
    return found


def _logits(decoder: Decoder, hidden: Tensor, num_rows: int) -> Tensor:
    """Return logits of [R, hidden size] rows; on a GPU R is padded, so that the same kernel always runs."""
    if not hidden.is_cuda:
        return decoder.compute_logits(hidden)
    return decoder.compute_logits(pad(hidden, (0, 0, 0, num_rows - len(hidden))))[: len(hidden)]
