"""POST /v1/completions."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.prompt_reader import TokenIds
from octavo.outputs import CompletionDelta, CompletionOutput, RequestOutput
from octavo.server.api.logprobs import LogprobWriter, check_logprobs, prompt_logprobs
from octavo.server.api.sse import AnswerEvents, TextEvents, event, is_only_text
from octavo.server.api.structs import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Usage,
)
from octavo.server.context import Context, new_id, note_left_out
from octavo.server.entry.sending import Parts
from octavo.server.generation import Generation, usage_of
from octavo.server.limits import while_present
from octavo.server.reading.processes import LONG_BYTES
from octavo.server.reading.requests import (
    TextInput,
    check_model,
    is_soon_read,
    num_prompts,
    parse_completion,
    read_texts,
)
from octavo.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Answer:
    """Data for every part of an answer.

    Attributes:
        echoes: the prompts' texts if they are to be repeated, else None.
    """

    id: str
    created: int
    model: str
    request: CompletionRequest
    n: int
    logprobs: LogprobWriter
    echoes: list[str] | None

    @property
    def only_echo(self) -> bool:
        """Whether only the prompt is shown, and not what is generated."""
        return self.request.max_tokens == 0


async def completions(context: Context, request: Request) -> Response:
    """Answer POST /v1/completions: continue each prompt."""
    found = await _read(context, request)
    note_left_out(request, found.left_out)
    context.check_room(num_prompts(found) * found.params.n)
    work = _generate(context, request, found)
    if found.fields.stream:
        generation, answer = await while_present(request, work)
        return context.events(CompletionEvents(answer, generation), generation)

    async def whole() -> Response:
        generation, answer = await work
        outputs = await generation.finish()
        parts = Parts()
        return parts.response(_completion(answer, outputs, parts), context.config.write_timeout_s)

    return await while_present(request, whole())


async def _read(context: Context, request: Request) -> TextInput:
    body = await context.read_body(request)
    if len(body) > LONG_BYTES:
        return await while_present(request, context.read_long_texts(request, body))
    found = parse_completion(body, context.defaults)
    check_model(found.fields.model, context.model)
    return found


async def _generate(context: Context, request: Request, found: TextInput) -> tuple[Generation, Answer]:
    fields, params, read = found.fields, found.params, found.prompts
    if read is None:
        prompts = context.materials.prompts
        if is_soon_read(fields):
            read = read_texts(prompts, found)
        else:
            read = await context.run(request, read_texts, prompts, found)
    check_logprobs(read, params, context.engine.prompts.max_model_len, num_copies=params.n)
    tokenizer = context.loop.engine.tokenizer
    answer = Answer(
        new_id("cmpl", request, fields.request_id),
        int(time.time()),
        context.model,
        fields,
        params.n,
        LogprobWriter(tokenizer, fields.logprobs or 0, ids_as_tokens=bool(fields.return_tokens_as_token_ids)),
        await context.run(request, _texts, tokenizer, read) if fields.echo else None,
    )
    salt = context.salt(request, fields.cache_salt)
    generation = await context.generate(read, params, cache_salt=salt, priority=fields.priority or 0)
    return generation, answer


def _texts(tokenizer: Tokenizer | None, prompts: Sequence[TokenIds]) -> list[str]:
    if tokenizer is None:
        return [""] * len(prompts)
    return [tokenizer.decode(prompt.listed, skip_special_tokens=False) for prompt in prompts]


def _completion(answer: Answer, outputs: Sequence[RequestOutput], parts: Parts) -> Completion:
    choices = [
        _whole_choice(answer, position, output, completion, parts)
        for position, output in enumerate(outputs)
        for completion in output.outputs
    ]
    usage = usage_of(outputs, without_output=answer.only_echo)
    return Completion(id=answer.id, created=answer.created, model=answer.model, choices=choices, usage=usage)


def _whole_choice(
    answer: Answer, position: int, output: RequestOutput, completion: CompletionOutput, parts: Parts
) -> CompletionChoice:
    fields = answer.request
    text = "" if answer.only_echo else completion.text
    token_ids = [] if answer.only_echo else completion.token_ids
    wants_prompt = fields.prompt_logprobs is not None and output.prompt_logprobs is not None
    return CompletionChoice(
        index=position * answer.n + completion.index,
        text=text if answer.echoes is None else answer.echoes[position] + text,
        logprobs=_whole_logprobs(answer, output, completion, parts),
        finish_reason="length" if answer.only_echo else completion.finish_reason,
        stop_reason=None if answer.only_echo else completion.stop_reason,
        token_ids=token_ids if fields.return_token_ids else UNSET,
        prompt_token_ids=output.prompt_token_ids if fields.return_token_ids else UNSET,
        prompt_logprobs=parts.later(prompt_logprobs(output.prompt_logprobs or [])) if wants_prompt else UNSET,
    )


def _whole_logprobs(
    answer: Answer, output: RequestOutput, completion: CompletionOutput, parts: Parts
) -> CompletionLogprobs | None:
    """Write a text's log-probabilities; with echo the prompt's come first."""
    if completion.logprobs is None:
        return None
    token_ids, entries = completion.token_ids, list(completion.logprobs)
    if answer.only_echo:
        token_ids, entries = [], []
    if answer.echoes is None:
        return answer.logprobs.completion(token_ids, entries, 0, parts)
    before = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
    return answer.logprobs.completion([*output.prompt_token_ids, *token_ids], [*before, *entries], 0, parts)


class _Text:
    """One of the texts that are streamed, and how far its stream has come."""

    __slots__ = ("has_begun", "offset")

    def __init__(self) -> None:
        self.has_begun = False
        self.offset = 0


class CompletionEvents(AnswerEvents):
    """Writes streamed texts: what is new, and the usage."""

    def __init__(self, answer: Answer, generation: Generation) -> None:
        super().__init__(answer.request, generation)
        self._answer = answer
        self._generation = generation
        self._texts = [_Text() for _ in range(len(generation.prompts) * answer.n)]
        # An event that may have more than text, or other text, is encoded as a whole.
        self._has_more = (
            self._usage.is_continuous
            or answer.only_echo
            or answer.echoes is not None
            or bool(answer.request.return_token_ids)
        )
        self._plain = TextEvents(lambda index, text: self._chunk([CompletionChoice(index=index, text=text)]))

    def _event(self, position: int, delta: CompletionDelta) -> bytes:
        answer = self._answer
        self._usage.add(0 if answer.only_echo else len(delta.token_ids))
        index = position * answer.n + delta.index
        if not self._has_more and is_only_text(delta):
            return self._plain.write(index, delta.text)
        choice = _choice(answer, self._generation, position, delta, self._texts[index])
        return b"" if choice is None else self._chunk([choice], self._usage.now)

    def _usage_event(self, usage: Usage) -> bytes:
        return self._chunk([], usage)

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | UnsetType = UNSET) -> bytes:
        answer = self._answer
        return event(
            Completion(id=answer.id, created=answer.created, model=answer.model, choices=choices, usage=usage)
        )


def _choice(
    answer: Answer, generation: Generation, position: int, delta: CompletionDelta, text: _Text
) -> CompletionChoice | None:
    """Return what is new, or None if a client would see nothing in it."""
    fields = answer.request
    new = "" if answer.only_echo else delta.text
    token_ids = () if answer.only_echo else delta.token_ids
    ids = generation.prompts[position].listed if fields.return_token_ids and not text.has_begun else UNSET
    if answer.echoes is not None and not text.has_begun:
        new = answer.echoes[position] + new
    text.has_begun = True
    if not (new or delta.finish_reason or delta.logprobs or fields.return_token_ids):
        return None
    logprobs = None
    if delta.logprobs is not None:
        logprobs = answer.logprobs.completion(delta.token_ids, delta.logprobs, text.offset)
        text.offset += sum(map(len, logprobs.tokens))
    return CompletionChoice(
        index=position * answer.n + delta.index,
        text=new,
        logprobs=logprobs,
        finish_reason="length" if answer.only_echo and delta.finish_reason else delta.finish_reason,
        stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
        token_ids=token_ids if fields.return_token_ids else UNSET,
        prompt_token_ids=ids,
    )
