"""From sampled tokens to what the user sees: text, stop strings, log-probabilities, deltas."""

import time
from dataclasses import dataclass, field

from octavo.engine.request import Request
from octavo.engine.sampler import SampledToken
from octavo.outputs import CompletionDelta, CompletionOutput, Logprob, RequestOutput
from octavo.tokenizer import IncrementalDecoder, StopChecker, Tokenizer


@dataclass(slots=True)
class _Completion:
    """One completion being written: its request, its decoder and the output so far."""

    request: Request
    output: CompletionOutput
    decoder: IncrementalDecoder | None
    stop_checker: StopChecker | None


@dataclass(slots=True)
class _Group:
    """A user's request: its output and how many of its completions still run."""

    output: RequestOutput
    completions: dict[int, _Completion] = field(default_factory=dict)
    num_unfinished: int = 0


class OutputProcessor:
    """Builds one RequestOutput per user request, and a CompletionDelta per change."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._groups: dict[str, _Group] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def add(self, requests: list[Request], prompt: str | None, prompt_token_ids: list[int]) -> None:
        """Start the output of a user's request, given its n engine requests."""
        leader = requests[0]
        output = RequestOutput(
            request_id=leader.request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=[CompletionOutput(request.index) for request in requests],
            metrics=leader.metrics,
        )
        group = _Group(output, num_unfinished=len(requests))
        for request, completion in zip(requests, output.outputs, strict=True):
            group.completions[request.index] = self._completion(request, completion)
        self._groups[leader.request_id] = group

    def requests(self, request_id: str) -> list[Request]:
        """The engine requests behind a user's request, finished ones included."""
        return [completion.request for completion in self._groups[request_id].completions.values()]

    def accept(self, request: Request, sampled: SampledToken) -> CompletionDelta:
        """Take the token just appended to a request; may set a finish reason (stop string)."""
        completion = self._groups[request.request_id].completions[request.index]
        output = completion.output
        output.token_ids.append(sampled.token_id)
        logprobs = None
        if sampled.top is not None:
            logprobs = (self.named(sampled.top),)
            self._append_logprobs(output, logprobs[0], sampled.token_id)
        text = self._new_text(completion, sampled.token_id) if completion.decoder is not None else ""
        return self._delta(completion, text, (sampled.token_id,), logprobs)

    def close(self, request: Request) -> CompletionDelta:
        """End a completion without a new token (abort, error, capacity): flush what text is held back."""
        completion = self._groups[request.request_id].completions[request.index]
        if request.error is not None:
            completion.decoder = None
        return self._delta(completion, self._flush(completion), (), None)

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

    def _append_logprobs(self, output: CompletionOutput, entry: dict[int, Logprob], token_id: int) -> None:
        if output.logprobs is None:
            output.logprobs, output.cumulative_logprob = [], 0.0
        output.logprobs.append(entry)
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) + entry[token_id].logprob

    def _new_text(self, completion: _Completion, token_id: int) -> str:
        request = completion.request
        assert completion.decoder is not None
        ended_by_token = request.finish_reason == "stop"
        text = ""
        if not ended_by_token or request.params.include_stop_str_in_output:
            text = completion.decoder.push([token_id])
        if completion.stop_checker and request.num_output_tokens > request.params.min_tokens:
            text = self._check_stop(completion, text)
        if request.finish_reason is not None:
            text += self._flush(completion)
        return text

    def _check_stop(self, completion: _Completion, text: str) -> str:
        assert completion.stop_checker is not None
        text, hit = completion.stop_checker.feed(text)
        if hit is not None:
            completion.request.finish("stop", stop_reason=hit)
            completion.decoder = None
        return text

    def _flush(self, completion: _Completion) -> str:
        """Text held back for an incomplete character or a possible stop string."""
        if completion.decoder is None:
            return ""
        text = completion.decoder.finish()
        completion.decoder = None
        if completion.stop_checker is None:
            return text
        text, hit = completion.stop_checker.feed(text)
        if hit is not None:
            completion.request.finish("stop", stop_reason=hit)
            return text
        return text + completion.stop_checker.flush()

    def _delta(
        self,
        completion: _Completion,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[dict[int, Logprob], ...] | None,
    ) -> CompletionDelta:
        request, output = completion.request, completion.output
        output.text += text
        if request.finish_reason is None:
            return CompletionDelta(request.request_id, request.index, text, token_ids, logprobs)
        output.finish_reason, output.stop_reason = request.finish_reason, request.stop_reason
        output.message = request.message
        return CompletionDelta(
            request.request_id,
            request.index,
            text,
            token_ids,
            logprobs,
            request.finish_reason,
            request.stop_reason,
            request.message,
            self._finished_output(request),
        )

    def _finished_output(self, request: Request) -> RequestOutput | None:
        """Count a completion as finished; the whole output once it was the last one."""
        group = self._groups[request.request_id]
        group.num_unfinished -= 1
        output = group.output
        output.error = output.error or request.error
        if group.num_unfinished:
            return None
        leader = group.completions[0].request
        output.num_cached_tokens = leader.num_cached_tokens
        if leader.prompt_logprobs_start is not None:
            output.prompt_logprobs = leader.prompt_logprobs
        output.metrics.finished_s = time.monotonic()
        output.finished = True
        del self._groups[request.request_id]
        return output
