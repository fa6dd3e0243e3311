"""The offline Python API: `LLM` generates, streams, chats, scores, decides and embeds in this process."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from itertools import chain
from typing import Literal

from octavo.config import EngineConfig
from octavo.engine.decisions import Question, decided, in_requests, read_input, read_question, scores_of
from octavo.engine.engine import Engine
from octavo.engine.engine_stats import EngineStats
from octavo.engine.pooled_calls import PooledCalls
from octavo.engine.prompt_reader import Prompt, TokenIds, as_prompt_list
from octavo.engine.shared_engine import Caller, SharedEngine
from octavo.errors import InvalidArgumentError, OctavoError
from octavo.garbage import collect_youngest, no_full_collections
from octavo.llm_arguments import (
    Message,
    as_continuation_list,
    as_conversations,
    as_params_list,
    as_questions,
)
from octavo.outputs import CompletionDelta, DecisionOutput, DeltaReader, RequestOutput, ScoreOutput
from octavo.progress import progress_bar
from octavo.sampling_params import CHAT_DEFAULTS, SamplingParams

OnError = Literal["raise", "return"]

_MAX_CHAT_TOKENS = 512

# While `generate` reads a list of prompts, it launches a step after this many, then after twice as many, and
# so on. Launching a step takes the host as long as reading dozens of prompts.
_FIRST_PROMPTS = 64


class LLM(PooledCalls):
    """A model in this process.

    Example:
        >>> llm = LLM("smollm2")
        >>> llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text

    Any thread may call it. Concurrent calls and open streams share batches. If a call is interrupted or a
    stream is dropped, its requests are aborted; later answers are not affected.
    """

    def __init__(self, model: str | None = None, *, progress: bool = False, **options: object) -> None:
        """Load a model.

        Args:
            model: "smollm2" (embedded default), a folder, a .gguf file or a hub id.
            progress: show a progress bar while loading.
            **options: fields of EngineConfig, such as dtype or num_blocks. Unknown names are refused.

        Raises:
            ConfigError: an option is unknown or wrong.
            ModelError: the model cannot be found, read or supported.
            OutOfMemoryError: weights or KV cache do not fit.
        """
        if model is not None:
            options["model"] = model
        config = EngineConfig.from_dict(options)
        with progress_bar("loading", enabled=progress) as report:
            self.engine = Engine(config, progress=report)
        self._shared = SharedEngine(self.engine)

    @classmethod
    def from_engine(cls, engine: Engine) -> "LLM":
        """Wrap a loaded engine."""
        llm = cls.__new__(cls)
        llm.engine, llm._shared = engine, SharedEngine(engine)
        return llm

    @property
    def stats(self) -> EngineStats:
        """Counters of the engine and its KV block pool."""
        return self._shared.call(self.engine.stats)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what holds where no parameters are given: the model's own defaults, else neutral values.

        They come from its generation_config.json; see the option generation_config.
        """
        return self.engine.sampling_defaults.params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: OnError = "raise",
        cache_salt: str = "",
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts, all batched together.

        Args:
            prompts: one prompt or a list: text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}.
            params: one for all prompts, or one per prompt. Default: `get_default_sampling_params`.
            on_error: what to do when a prompt cannot run. "raise" aborts the whole call; "return" gives that
                prompt an output with `error` set and runs the others.
            cache_salt: only requests with the same salt share cached prefixes.
            progress: show a progress bar.

        Returns:
            One output per prompt, in order.

        Raises:
            PromptError, SamplingParamsError: see on_error.
            EngineError: with on_error="raise", the engine failed on a request.
        """
        prompt_list = as_prompt_list(prompts)
        params = self.get_default_sampling_params() if params is None else params
        params_list = as_params_list(params, len(prompt_list))
        if on_error not in ("raise", "return"):
            raise InvalidArgumentError(f"on_error must be 'raise' or 'return', got {on_error!r}")
        return self._run(prompt_list, params_list, on_error, cache_salt, progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> "CompletionStream":
        """Stream the completion of one prompt. Closing or dropping the iterator aborts the request.

        Raises:
            PromptError, SamplingParamsError: before the first delta.
            EngineError: the engine failed on this request.
        """
        caller = self._shared.caller()
        try:
            params = self.get_default_sampling_params() if params is None else params
            return CompletionStream(self._shared, caller, caller.add(prompt, params, cache_salt=cache_salt))
        except BaseException:
            # A kept exception would keep the caller alive through its traceback.
            caller.close()
            raise

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: OnError = "raise",
        cache_salt: str = "",
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer conversations with the model's chat template.

        Args:
            messages: one conversation, a list of {"role": ..., "content": ...}, or a list of conversations.
            params: default: the model's own, else temperature 0.6 and top_p 0.95; at most 512 tokens.
            on_error, cache_salt, progress: as in `generate`.

        Raises:
            ChatTemplateError: the model has no chat template, or it refuses the messages.
        """
        prompts: list[Prompt] = [
            self.chat_prompt(conversation) for conversation in as_conversations(messages)
        ]
        params = self._chat_params() if params is None else params
        return self.generate(prompts, params, on_error=on_error, cache_salt=cache_salt, progress=progress)

    def chat_stream(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> "CompletionStream":
        """Stream the answer to one conversation; see `chat` and `stream`."""
        params = self._chat_params() if params is None else params
        return self.stream(self.chat_prompt(messages), params, cache_salt=cache_salt)

    def chat_prompt(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Render messages with the model's chat template and tokenize them."""
        return self.engine.prompts.render_chat(messages, add_generation_prompt=add_generation_prompt)

    def score(
        self,
        prefix: str | Sequence[int],
        continuations: Sequence[str | Sequence[int]],
        *,
        cache_salt: str = "",
    ) -> list[ScoreOutput]:
        """Return log-probabilities of continuations of one prefix, which is computed once.

        Prefix and continuation are tokenized separately and joined as ids; pass ids to place the border
        yourself. Sharing covers whole KV blocks and needs enable_prefix_caching.

        Args:
            prefix: text or token ids, at least one token.
            continuations: texts or token ids, at least one token each.
            cache_salt: as in `generate`.

        Raises:
            PromptError: prefix or a continuation is empty or malformed, or `continuations` is not a list.
            EngineError: the engine failed on a request, or another thread aborted it.
        """
        continuation_list = as_continuation_list(continuations)
        prefix_ids = self.engine.prompts.read(prefix)
        suffixes = [self.engine.prompts.read_continuation(continuation) for continuation in continuation_list]
        scores = self._score([(prefix_ids, [suffix]) for suffix in suffixes], cache_salt)
        return [score for (score,) in scores]

    def decide(
        self,
        input: str | Sequence[Message],
        questions: Sequence[str | Question],
        *,
        instructions: str | None = None,
        raw: bool = False,
        length_normalized: bool = False,
        cache_salt: str = "",
    ) -> list[DecisionOutput]:
        """Answer many questions over one input by the most likely of their choices: see `score`.

        Args:
            input: a text, which becomes a user's message, or messages of a conversation. Each question is
                put behind it, in the last message of the user or in a new one, and choices begin the answer.
            questions: texts, whose choices are yes and no, or Questions.
            instructions: the text of a system message before the input.
            raw: the input is a text that questions and choices continue as they are, without a template.
            length_normalized: compare means of log-probabilities over a choice's tokens, not sums.
            cache_salt: as in `generate`.

        Raises:
            PromptError, RequestTooLongError: input, a question or a choice is empty, malformed or too long.
            ChatTemplateError: the model has no chat template, or it refuses the messages.
            EngineError: as `score`.
        """
        prompts = self.engine.prompts
        shared = read_input(prompts, input, instructions=instructions, raw=raw)
        asked = [item if isinstance(item, Question) else Question(item) for item in as_questions(questions)]
        read = [read_question(prompts, shared, question) for question in asked]
        jobs = [(shared.token_ids + one.token_ids, one.choices) for one in read]
        return [
            decided(one.choices, scores, length_normalized=length_normalized)
            for one, scores in zip(asked, self._score(jobs, cache_salt), strict=True)
        ]

    def abort(self, request_id: str) -> None:
        """End a running request; its stream ends with finish_reason "abort"."""
        self._shared.call(lambda: self.engine.abort(request_id))

    def reset_prefix_cache(self) -> int:
        """Drop all cached blocks that no request uses; return how many."""
        return self._shared.call(self.engine.reset_prefix_cache)

    def _chat_params(self) -> SamplingParams:
        defaults = {**CHAT_DEFAULTS, **self.engine.sampling_defaults.values}
        return SamplingParams.from_dict({"max_tokens": _MAX_CHAT_TOKENS, **defaults})

    def _run(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        on_error: OnError,
        cache_salt: str,
        progress: bool,
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        step_at = _FIRST_PROMPTS
        with (
            progress_bar("generating", enabled=progress) as report,
            closing(self._shared.caller()) as caller,
            no_full_collections(),
        ):
            for number, (prompt, params_) in enumerate(zip(prompts, params, strict=True), start=1):
                outputs.append(_add(caller, prompt, params_, on_error, cache_salt))
                if number == step_at and self.engine.runner.runs_ahead:
                    # The device works while this loop reads more prompts.
                    self._shared.call(self.engine.step)
                    step_at *= 2
            collect_youngest()
            for number, output in enumerate(outputs, start=1):
                self._wait(output)
                report("generating", number, len(outputs))
        for output in outputs:
            if output.error is not None and on_error == "raise":
                raise output.error
        return outputs

    def _score(
        self, jobs: Sequence[tuple[TokenIds, Sequence[TokenIds]]], cache_salt: str
    ) -> list[list[ScoreOutput]]:
        """Score the choices of each job after its ids."""
        with closing(self._shared.caller()) as caller, no_full_collections():
            add = partial(caller.add, cache_salt=cache_salt, read_along=False)
            outputs = [
                [
                    add(before + choices[places[0]], params, prompt_logprobs_start=len(before.listed))
                    for places, params in in_requests([choice.listed for choice in choices])
                ]
                for before, choices in jobs
            ]
            for output in chain.from_iterable(outputs):
                self._wait(output)
        return [
            scores_of([choice.listed for choice in choices], own)
            for (_, choices), own in zip(jobs, outputs, strict=True)
        ]

    def _wait(self, output: RequestOutput) -> None:
        self._shared.run_until(lambda: output.finished)


class CompletionStream(Iterator[CompletionDelta], AbstractContextManager["CompletionStream"]):
    """Iterates over the deltas of one request. A `with` block closes it.

    A delta holds all that is new since the last one: one token, or more if other calls ran steps meanwhile.
    """

    def __init__(self, shared: SharedEngine, caller: Caller, output: RequestOutput) -> None:
        self._shared = shared
        self._caller = caller
        self._reader = DeltaReader(output)
        self._deltas: deque[CompletionDelta] = deque()
        self._ended = False

    def __next__(self) -> CompletionDelta:
        if self._ended:
            raise StopIteration
        try:
            if not self._deltas:
                self._deltas.extend(self._shared.run_until(self._reader.read))
            delta = self._deltas.popleft()
            if delta.output is not None:
                self._ended = True
                if delta.output.error is not None:
                    raise delta.output.error
        except BaseException:
            self.close()
            raise
        return delta

    def close(self) -> None:
        """Abort the request if it still runs; the stream ends."""
        self._ended = True
        self._caller.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def _add(
    caller: Caller, prompt: Prompt, params: SamplingParams, on_error: OnError, cache_salt: str
) -> RequestOutput:
    try:
        return caller.add(prompt, params, cache_salt=cache_salt, read_along=False)
    except OctavoError as error:
        if on_error == "raise":
            raise
        return RequestOutput("", None, [], [], finished=True, error=error)
