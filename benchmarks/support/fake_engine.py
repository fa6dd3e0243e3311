"""An engine that only pretends to compute: a token and a word to every request, each step."""

import time
from array import array
from types import SimpleNamespace
from typing import Any

from octavo import SamplingParams
from octavo.engine.prompt_reader import PromptReader, TokenIds
from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.tokenizer import Tokenizer

VOCAB_SIZE = 1 << 16


class FakeEngine:
    """As much of an Engine as the loop uses.

    Args:
        step_s: how long a step leaves the processor to others; 0: not at all.
        tokenizer: of prompts that are texts.
    """

    spare_s, error = 0.0, None
    # Nothing is counted.
    num_computed_tokens = 0

    def __init__(self, step_s: float, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer
        self.prompts = PromptReader(
            tokenizer, vocab_size=VOCAB_SIZE, max_model_len=1 << 20, num_kv_tokens=1 << 20
        )
        self._step_s = step_s
        self._running: dict[str, tuple[RequestOutput, int]] = {}
        self.num_steps = 0

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._running)

    def add_request(
        self, prompt: TokenIds, params: SamplingParams, *, request_id: str, **_: object
    ) -> RequestOutput:
        """Start an output."""
        now = time.monotonic()
        metrics = RequestMetrics(arrival_s=now, first_scheduled_s=now, num_prompt_tokens=len(prompt.listed))
        output = RequestOutput(request_id, None, prompt.listed, [CompletionOutput(0)], metrics=metrics)
        self._running[request_id] = output, params.max_tokens or 1
        return output

    def step(self) -> None:
        """Write a token to every output, in the order of output_processor.py."""
        if self._step_s:
            time.sleep(self._step_s)
        self.num_steps += 1
        for request_id, (output, max_tokens) in list(self._running.items()):
            completion = output.outputs[0]
            if output.metrics.first_token_s is None:
                output.metrics.first_token_s = time.monotonic()
            output.metrics.num_output_tokens += 1
            completion.token_ids.append(7)
            completion.text += " word"
            if len(completion.token_ids) == max_tokens:
                completion.finish_reason = "length"
                output.metrics.finished_s = time.monotonic()
                output.finished = True
                del self._running[request_id]

    def abort(self, request_id: str) -> None:
        """Forget a request."""
        self._running.pop(request_id, None)

    def stats(self) -> Any:
        """No counters."""
        return SimpleNamespace(kv=SimpleNamespace(num_referenced=0))

    def when_dead(self, call: object) -> None:
        """Nothing here dies."""

    def close(self) -> None:
        """Nothing is held."""


def cpu_s_alone(num_streams: int, num_tokens: int, step_s: float) -> float:
    """Seconds of CPU that the stand-in takes by itself."""
    engine = FakeEngine(step_s)
    for number in range(num_streams):
        engine.add_request(short_prompt(), plain_params(num_tokens), request_id=str(number))
    start = time.process_time()
    while engine.has_unfinished_requests:
        engine.step()
    return time.process_time() - start


def short_prompt() -> TokenIds:
    """A prompt of one token."""
    return TokenIds([5], array("i", [5]))


def plain_params(num_tokens: int) -> SamplingParams:
    """Nothing but a length."""
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)
