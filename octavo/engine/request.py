"""A request's state, one completion from its prompt to its last token. The scheduler owns it; no torch."""

import enum
import time
from array import array
from dataclasses import dataclass, field

import numpy as np

from octavo.engine.sampling.option_table import adjustments, asks_for_filters
from octavo.engine.structured.matcher import Grammar, Matcher
from octavo.errors import OctavoError
from octavo.kv import SequenceBlocks
from octavo.outputs import FinishReason, Logprob, RequestMetrics
from octavo.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands.

    WAITING --admit--> RUNNING --finish--> FINISHED
       ^------preempt-----'
    """

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and one completion of it. A user's request with n > 1 is n of these: a leader and its forks.

    Attributes:
        request_id: the user's request id; shared by a leader and its forks.
        index: which of the n completions.
        token_ids: prompt, then output, as int32: the form that steps and block keys need.
        num_prompt_tokens: how many of them are prompt.
        params: what the user asked for.
        max_num_tokens: token_ids never grow past this (max_tokens and the model's context).
        seed: keys the sampler's random numbers together with the output position.
        stop_token_ids: EOS ids (unless ignored) and the user's stop ids.
        blocks: the KV blocks it holds; empty while it waits.
        num_pending_tokens: output tokens a device has sampled, or will have, that are not in token_ids yet.
        num_computed_tokens: leading tokens whose KV is in the cache, or will be after the steps in flight.
        num_cached_tokens: prompt tokens that came from the prefix cache at first admission.
        is_read_along: somebody reads its tokens as they come, not only once all are there.
        priority: while it waits for its first admission, requests with a higher number are behind it.
        prompt_logprobs_start: first prompt position whose log-probability is wanted, None for none.
        pools_all: the states of all its tokens are pooled, so none of them may come from the prefix cache.
        pooled: what steps have pooled so far, if its model embeds or classifies; else None.
        prompt_logprobs: by prompt position, filled as chunks are computed.
        forks: completions that start when this leader's prompt is computed.
        grammar: what its output must be, compiled from params.structured; None: anything.
        matcher: where in its grammar the output is; None without a grammar.
        row: while running, its row of the block tables and of the device's state; else -1.
        adjustments: sampling options that change its logits, by name; see sampling/option_table.py.
        asks_for_filters: top-k, top-p or min-p drops tokens before its draws.
    """

    request_id: str
    index: int
    token_ids: "array[int]"
    num_prompt_tokens: int
    params: SamplingParams
    max_num_tokens: int
    seed: int
    stop_token_ids: frozenset[int]
    blocks: SequenceBlocks
    metrics: RequestMetrics
    is_read_along: bool = True
    priority: int = 0
    grammar: Grammar | None = None
    prompt_logprobs_start: int | None = None
    pools_all: bool = False
    pooled: np.ndarray | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    forks: list["Request"] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    num_pending_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    row: int = -1
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    message: str | None = None
    error: OctavoError | None = None
    adjustments: tuple[str, ...] = field(init=False)
    asks_for_filters: bool = field(init=False)
    matcher: Matcher | None = field(init=False)

    def __post_init__(self) -> None:
        # They are computed once, because every step looks at them for all its requests.
        self.adjustments = adjustments(self)
        self.asks_for_filters = asks_for_filters(self)
        self.matcher = None if self.grammar is None else self.grammar.matcher()
        if self.prompt_logprobs_start is not None:
            self.prompt_logprobs = [None] * self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens it has, including those that only the device knows yet."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known here."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_to_compute(self) -> int:
        """Tokens whose KV is not in the cache yet: 1 while decoding, more while catching up."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def has_begun(self) -> bool:
        """Whether it, or the leader of which it is a fork, was admitted before."""
        return self.metrics.first_scheduled_s is not None

    @property
    def is_structured(self) -> bool:
        """Whether its output follows a grammar."""
        return self.params.structured is not None

    @property
    def waits_for_token(self) -> bool:
        """Whether it must wait for a token still on the device, because its grammar depends on it."""
        return self.num_pending_tokens > 0 and self.matcher is not None

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def max_cached_tokens(self) -> int:
        """How many leading tokens may come from the prefix cache.

        At least one token is always computed, since only computed tokens give logits; wanted prompt
        log-probabilities need the logits from the position before the first of them on. Forks begin with the
        last token of the prompt, and layers with windows keep only what the next token sees.
        """
        limit = 0 if self.pools_all else self.num_tokens - 1
        if self.forks:
            limit = min(limit, self.num_prompt_tokens - 1)
        if self.prompt_logprobs_start is not None and self.prompt_logprobs[-1] is None:
            limit = min(limit, self.prompt_logprobs_start - 1)
        return limit

    def finish(
        self, reason: FinishReason, *, stop_reason: str | int | None = None, message: str | None = None
    ) -> None:
        """Set the outcome; the scheduler frees the blocks."""
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.message = message

    def rewind(self) -> None:
        """Forget output and outcome and keep the prompt; the caller appends again what the user has seen."""
        del self.token_ids[self.num_prompt_tokens :]
        self.matcher = None if self.grammar is None else self.grammar.matcher()
        self.finish_reason = self.stop_reason = self.message = self.error = None
        if None in self.prompt_logprobs[max(1, self.prompt_logprobs_start or 0) :]:
            self.prompt_logprobs = [None] * self.num_prompt_tokens

    def start_over(self) -> None:
        """Wait for admission as if nothing were computed; token_ids stay."""
        self.status = RequestStatus.WAITING
        self.forks = []
        self.row = -1
        self.num_computed_tokens = self.num_pending_tokens = 0

    def fail(self, error: OctavoError) -> None:
        """End with a typed error."""
        self.error = error
        self.finish("error", message=str(error))

    def append_output(self, token_id: int) -> None:
        """Append a sampled token and set the finish reason it causes, if any (stop strings come later).

        A token that its grammar does not take fails the request and is not appended.
        """
        if self.matcher is not None and (error := self.matcher.accept(token_id)) is not None:
            self.fail(error)
            return
        if self.metrics.first_token_s is None:
            self.metrics.first_token_s = time.monotonic()
        self.token_ids.append(token_id)
        self.metrics.num_output_tokens += 1
        if token_id in self.stop_token_ids and self.num_output_tokens >= self.params.min_tokens:
            self.finish(
                "stop", stop_reason=token_id if token_id in (self.params.stop_token_ids or ()) else None
            )
        elif self.matcher is not None and self.matcher.is_complete:
            self.finish("stop")
        elif len(self.token_ids) >= self.max_num_tokens:
            self.finish("length")
