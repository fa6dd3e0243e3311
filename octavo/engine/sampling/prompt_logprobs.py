"""Log-probabilities of prompt tokens, taken from each chunk of a prompt as a step computes it."""

from collections.abc import Sequence

from torch import Tensor

from octavo.engine.sampling.sampler import Top, log_softmax, top_logprobs
from octavo.engine.scheduler import ScheduledRequest
from octavo.engine.step_result import PromptLogprobs
from octavo.models import Decoder

# Logits of prompt positions are computed in slices of at most this size.
_MAX_LOGITS_BYTES = 64 * 2**20


def prompt_logprobs(
    decoder: Decoder, scheduled: Sequence[ScheduledRequest], hidden: Tensor
) -> list[PromptLogprobs]:
    """Return the prompt log-probabilities that a step yields: its token at position i predicts i + 1.

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


def _of_chunk(decoder: Decoder, item: ScheduledRequest, hidden: Tensor) -> list[PromptLogprobs]:
    """The same for one request: row i of `hidden` predicts position item.start + i + 1."""
    request = item.request
    first = item.start + 1
    start = max(first, request.prompt_logprobs_start or 0)
    stop = min(item.end + 1, request.num_prompt_tokens)
    if start >= stop:
        return []
    num = request.params.prompt_logprobs or 0
    tops: list[Top] = []
    wanted = hidden[start - first : stop - first]
    for rows in wanted.split(max(1, _MAX_LOGITS_BYTES // (4 * decoder.config.vocab_size))):
        logprobs = log_softmax(decoder.compute_logits(rows))
        at = start + len(tops)
        tops += top_logprobs(logprobs, request.token_ids[at : at + len(rows)], [num] * len(rows))
    return [PromptLogprobs(request, start, tops)]
