"""Results of the engine for users and servers: outputs, deltas, log-probabilities, metrics."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from octavo.errors import EngineError, OctavoError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability (natural log) under the model.

    Attributes:
        logprob: log-probability before penalties, temperature and filters.
        rank: 1 for the most likely token of the vocabulary.
        decoded_token: the token's text, None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Timestamps (time.monotonic seconds) and counts of one request.

    Attributes:
        arrival_s: when the request entered the engine.
        first_scheduled_s: when its first token was scheduled.
        first_token_s: when its first output token was known.
        finished_s: when it finished.
        num_prompt_tokens: prompt length.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        num_output_tokens: generated tokens, over all n completions.
        num_preemptions: how often it lost its blocks and was recomputed.
    """

    arrival_s: float = 0.0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0

    @property
    def queue_s(self) -> float | None:
        """Seconds from arrival to the first scheduled token."""
        return None if self.first_scheduled_s is None else self.first_scheduled_s - self.arrival_s

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from arrival to the first output token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_latency_s(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished_s is None else self.finished_s - self.arrival_s


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n completions.

    Attributes:
        index: 0 to n - 1.
        text: generated text, without the stop string; empty when detokenize is False.
        token_ids: generated ids, the stop token included.
        logprobs: one {token id: Logprob} per generated token, or None when not asked for.
        cumulative_logprob: sum over the sampled tokens, or None when logprobs were not asked for.
        finish_reason: "stop" (EOS, stop id, stop string), "length", "abort", "error"; None while running.
        stop_reason: the stop string or stop token id that ended it; None for EOS.
        message: a sentence that explains an unusual finish_reason, else None.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    message: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """The state of one request: a prompt and its n completions.

    Attributes:
        request_id: unique in its engine.
        prompt: the text given, None when token ids were given.
        prompt_token_ids: what the model read.
        prompt_logprobs: a {token id: Logprob} per prompt token; None for the first. None if not asked for.
        pooled: [n] float32, the pooled state or the logits of a model that embeds or classifies, once it is
            finished; see Pooling.read. Else None.
        outputs: n completions, by index.
        finished: all completions have a finish_reason.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        metrics: times and counts.
        error: the typed error that refused or ended this request, else None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    pooled: np.ndarray | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: OctavoError | None = None

    @property
    def vector(self) -> np.ndarray:
        """What was pooled of a finished request.

        Raises:
            OctavoError: what ended it; EngineError: it was aborted.
        """
        if self.error is not None:
            raise self.error
        if self.pooled is None:
            raise EngineError("the request was aborted before its prompt was pooled")
        return self.pooled


@dataclass(slots=True)
class CompletionDelta:
    """New text and tokens of a completion since the last delta; all deltas add up to the whole.

    Attributes:
        request_id: the request's id.
        index: which of its n completions.
        text: new text; empty while a character or a possible stop string is incomplete.
        token_ids: new token ids.
        logprobs: for the new tokens, when asked for.
        finish_reason: set on the last delta of this completion.
        stop_reason: as in CompletionOutput.
        message: as in CompletionOutput.
        output: the whole request, set on the last delta of its last completion.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    message: str | None = None
    output: RequestOutput | None = None


class DeltaReader:
    """Reads one output piece by piece, while another thread may write to it.

    The engine stores nothing for readers: each `read` returns what all steps since the last `read` added.
    It needs no lock, because it reads in the opposite order of `engine/output_processor.py`:

        written   logprobs -> token_ids -> text -> finish_reason -> finished
        read      finished -> finish_reason -> text -> token_ids -> logprobs

    So whatever was read first, all that was written before it is there. One thread reads at a time.
    """

    def __init__(self, output: RequestOutput) -> None:
        self._output = output
        self._cutters = [_Cutter(completion) for completion in output.outputs]
        self._num_open = len(self._cutters)

    def read(self) -> list[CompletionDelta]:
        """Return what is new, at most one delta per completion; the very last delta carries the output."""
        output = self._output
        finished = output.finished
        deltas = []
        for cutter in self._cutters:
            # The end of the last completion is news together with the end of all.
            delta = cutter.cut(output.request_id, may_end=finished or self._num_open > 1)
            if delta is not None:
                deltas.append(delta)
                if delta.finish_reason is not None:
                    self._num_open -= 1
        if finished and deltas:
            deltas[-1].output = output
        return deltas


class _Cutter:
    """Cuts what is new in one completion."""

    __slots__ = ("_completion", "_has_ended", "_num_chars", "_num_tokens")

    def __init__(self, completion: CompletionOutput) -> None:
        self._completion = completion
        self._num_tokens = self._num_chars = 0
        self._has_ended = False

    def cut(self, request_id: str, *, may_end: bool) -> CompletionDelta | None:
        """Return what was written since the last call, or None.

        Args:
            request_id: for the delta.
            may_end: if the completion has ended, say so.
        """
        completion, num_tokens, num_chars = self._completion, self._num_tokens, self._num_chars
        if self._has_ended:
            return None
        ended = may_end and completion.finish_reason is not None
        text, token_ids, logprobs = completion.text, completion.token_ids, completion.logprobs
        end = len(token_ids)
        if end == num_tokens and len(text) == num_chars and not ended:
            return None
        self._num_tokens, self._num_chars, self._has_ended = end, len(text), ended
        delta = CompletionDelta(
            request_id,
            completion.index,
            text[num_chars:],
            tuple(token_ids[num_tokens:end]),
            None if logprobs is None else tuple(logprobs[num_tokens:end]),
        )
        if ended:
            delta.finish_reason, delta.stop_reason = completion.finish_reason, completion.stop_reason
            delta.message = completion.message
        return delta


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The log-probability of a continuation after a prefix.

    Attributes:
        token_ids: the continuation's ids.
        token_logprobs: natural-log probability of each of them.
        logprob: their sum.
        normalized_logprob: their mean (length-normalised).
        num_cached_tokens: prefix tokens that were not computed again.
    """

    token_ids: list[int]
    token_logprobs: list[float]
    logprob: float
    normalized_logprob: float
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class DecisionOutput:
    """The answer to one question of `LLM.decide`.

    Attributes:
        choice: the most likely one.
        probabilities: of each choice among all of the question's: they add up to 1.
        scores: of each choice after input and question, in their order.
    """

    choice: str
    probabilities: dict[str, float]
    scores: list[ScoreOutput]


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """What a model that embeds or classifies makes of a prompt.

    Attributes:
        values: the embedding, or the probability of each label.
        prompt_token_ids: what the model read.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        label: the most likely label; None for an embedding.
    """

    values: list[float]
    prompt_token_ids: list[int]
    num_cached_tokens: int
    label: str | None = None


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """How well a document answers a query: which of those given, and a probability or a cosine."""

    index: int
    score: float
