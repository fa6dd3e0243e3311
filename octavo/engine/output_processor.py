"""From sampled tokens to what the user sees: text, stop strings, log-probabilities.

An engine that starts over trusts the outputs and nothing else. So the order of writes matters:

    logprobs -> token_ids -> text -> finish_reason -> (of all completions) finished

A token counts once it is in token_ids. All that is written after it follows from the tokens, and `rewind`
makes it again. No reader ever sees a field shrink.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.engine.request import Request, RequestStatus
from octavo.engine.sampling.sampler import SampledToken
from octavo.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.tokenizer import IncrementalDecoder, StopChecker, Tokenizer


@dataclass(slots=True)
class _Completion:
    """A completion that is being written."""

    request: Request
    output: CompletionOutput
    decoder: IncrementalDecoder | None
    stop_checker: StopChecker | None


@dataclass(slots=True)
class _Group:
    """A user's request: its output and its n completions."""

    output: RequestOutput
    completions: list[_Completion] = field(default_factory=list)


class OutputProcessor:
    """Writes one RequestOutput per user request."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._groups: dict[str, _Group] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def __len__(self) -> int:
        """Return how many user requests are unfinished."""
        return len(self._groups)

    def add(self, requests: list[Request], prompt: str | None, prompt_token_ids: list[int]) -> RequestOutput:
        """Start the output of a user's request, given its n engine requests."""
        leader = requests[0]
        output = RequestOutput(
            request_id=leader.request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=[CompletionOutput(request.index) for request in requests],
            metrics=leader.metrics,
        )
        group = _Group(output)
        for request, completion in zip(requests, output.outputs, strict=True):
            if request.params.logprobs is not None:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            group.completions.append(self._completion(request, completion))
        self._groups[leader.request_id] = group
        return output

    def unfinished(self, request_id: str) -> Iterator[Request]:
        """Yield the unfinished engine requests behind a user's request; none for an unknown id."""
        group = self._groups.get(request_id)
        for completion in () if group is None else group.completions:
            if not completion.request.is_finished:
                yield completion.request

    def accept(self, request: Request, sampled: SampledToken) -> None:
        """Take the token just appended to a request; may set a finish reason (stop string)."""
        completion = self._groups[request.request_id].completions[request.index]
        output = completion.output
        if sampled.top is not None:
            entry = self.named(sampled.top)
            assert output.logprobs is not None
            output.logprobs.append(entry)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + entry[sampled.token_id].logprob
        output.token_ids.append(sampled.token_id)
        if completion.decoder is not None:
            output.text += self._new_text(completion, sampled.token_id)
        if request.finish_reason is not None:
            self._finish(completion)

    def close(self, request: Request) -> None:
        """End a completion without a new token (abort, error, capacity): flush what text is held back."""
        completion = self._groups[request.request_id].completions[request.index]
        if request.error is not None:
            completion.decoder = None
        completion.output.text += self._flush(completion)
        self._finish(completion)

    def rewind(self) -> list[Request]:
        """Bring requests and outputs back to the tokens that count; returns the unfinished requests in order.

        An engine calls it whose last step was interrupted anywhere.
        """
        unfinished = []
        for group in list(self._groups.values()):
            group.output.metrics.num_output_tokens = 0
            for index, completion in enumerate(group.completions):
                if completion.output.finish_reason is None:
                    # This counts its tokens anew, and may find that the last one ends it.
                    group.completions[index] = self._replay(completion)
                else:
                    group.output.metrics.num_output_tokens += len(completion.output.token_ids)
                if completion.output.finish_reason is None:
                    unfinished.append(completion.request)
                else:
                    completion.request.status = RequestStatus.FINISHED
            self._finish_group(group)
        return unfinished

    def _replay(self, completion: _Completion) -> _Completion:
        """Read an unfinished completion's tokens as if they came again."""
        request, output = completion.request, completion.output
        request.rewind()
        replayed = self._completion(request, output)
        if output.logprobs is not None:
            del output.logprobs[len(output.token_ids) :]
            pairs = zip(output.logprobs, output.token_ids, strict=True)
            output.cumulative_logprob = sum((entry[token_id].logprob for entry, token_id in pairs), 0.0)
        text = ""
        for token_id in output.token_ids:
            request.append_output(token_id)
            if replayed.decoder is not None:
                text += self._new_text(replayed, token_id)
        output.text = text
        if request.finish_reason is not None:
            self._finish(replayed)
        return replayed

    def named(self, top: list[tuple[int, float, int]]) -> dict[int, Logprob]:
        """Turn (id, log-probability, rank) tuples into Logprobs with their text."""
        text = self.tokenizer.token_text if self.tokenizer else lambda _: None
        return {token_id: Logprob(value, rank, text(token_id)) for token_id, value, rank in top}

    def _completion(self, request: Request, output: CompletionOutput) -> _Completion:
        params = request.params
        if self.tokenizer is None or not params.detokenize:
            return _Completion(request, output, None, None)
        decoder = self.tokenizer.incremental_decoder(skip_special_tokens=params.skip_special_tokens)
        stop_checker = None
        if params.stop:
            stop_checker = StopChecker(tuple(params.stop), include_stop=params.include_stop_str_in_output)
        return _Completion(request, output, decoder, stop_checker)

    def _new_text(self, completion: _Completion, token_id: int) -> str:
        request = completion.request
        assert completion.decoder is not None
        # The last token of a grammar ends the output too, and is text.
        ended_by_token = request.finish_reason == "stop" and token_id in request.stop_token_ids
        text = ""
        if not ended_by_token or request.params.include_stop_str_in_output:
            text = completion.decoder.push([token_id])
        if completion.stop_checker:
            text = self._check_stop(completion, text)
        if request.finish_reason is not None:
            text += self._flush(completion)
        return text

    def _check_stop(self, completion: _Completion, text: str) -> str:
        assert completion.stop_checker is not None
        request = completion.request
        may_stop = request.num_output_tokens >= request.params.min_tokens
        text, hit = completion.stop_checker.feed(text, may_stop=may_stop)
        if hit is not None:
            request.finish("stop", stop_reason=hit)
            completion.decoder = None
        return text

    def _flush(self, completion: _Completion) -> str:
        """Return the text held back for an incomplete character or a possible stop string."""
        if completion.decoder is None:
            return ""
        text = completion.decoder.finish()
        if completion.stop_checker is not None:
            text = self._check_stop(completion, text) + completion.stop_checker.flush()
        completion.decoder = None
        return text

    def _finish(self, completion: _Completion) -> None:
        """Write a completion's outcome; the whole output ends with the last completion."""
        request, output = completion.request, completion.output
        output.stop_reason, output.message = request.stop_reason, request.message
        output.finish_reason = request.finish_reason
        self._finish_group(self._groups[request.request_id])

    def _finish_group(self, group: _Group) -> None:
        output, leader = group.output, group.completions[0].request
        if any(completion.finish_reason is None for completion in output.outputs):
            return
        output.num_cached_tokens = leader.num_cached_tokens
        output.error = next((c.request.error for c in group.completions if c.request.error), None)
        output.pooled = leader.pooled if leader.finish_reason == "stop" else None
        if leader.prompt_logprobs_start is not None:
            output.prompt_logprobs = leader.prompt_logprobs
        output.metrics.finished_s = time.monotonic()
        output.finished = True
        self._groups.pop(output.request_id, None)
