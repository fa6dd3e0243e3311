"""POST /v1/chat/completions."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.outputs import CompletionDelta, CompletionOutput, RequestOutput
from octavo.server.api.chat_answers import DeltaWriter, is_empty, whole_message
from octavo.server.api.left_out import asks_to_keep
from octavo.server.api.logprobs import LogprobWriter, check_logprobs, prompt_logprobs
from octavo.server.api.sampling import Defaults
from octavo.server.api.sse import AnswerEvents, TextEvents, event, is_only_text
from octavo.server.api.structs import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    Delta,
    Usage,
    wish_of,
)
from octavo.server.api.tools.toolbox import Toolbox, read_prompt, wished_variables
from octavo.server.context import Context, new_id, note_left_out
from octavo.server.entry.sending import Parts
from octavo.server.generation import Generation, usage_of
from octavo.server.limits import while_present
from octavo.server.reading.processes import LONG_BYTES
from octavo.server.reading.requests import ChatInput, check_model, parse_chat, reading_of

Written = TypeVar("Written")


@dataclass(frozen=True, slots=True)
class Answer:
    """Data for every part of an answer."""

    id: str
    created: int
    model: str
    request: ChatRequest
    logprobs: LogprobWriter

    def logprobs_of(
        self, answer: CompletionOutput | CompletionDelta, parts: Parts | None = None
    ) -> ChatLogprobs | None:
        return (
            None if answer.logprobs is None else self.logprobs.chat(answer.token_ids, answer.logprobs, parts)
        )


async def chat_completions(context: Context, request: Request) -> Response:
    """Answer a conversation."""
    found = await read_chat(context, request, parse_chat)
    fields, params = found.chat, found.params
    answer = Answer(
        new_id("chatcmpl", request, fields.request_id),
        int(time.time()),
        context.model,
        fields,
        LogprobWriter(
            context.loop.engine.tokenizer,
            fields.top_logprobs or 0,
            ids_as_tokens=bool(fields.return_tokens_as_token_ids),
        ),
    )

    if fields.stream:
        generation, box = await while_present(request, begin_chat(context, request, found))
        return context.events(ChatEvents(answer, generation, box, params.n), generation)
    parts = Parts()
    completion = await answer_whole(context, request, found, partial(_completion, answer, parts))
    return parts.response(completion, context.config.write_timeout_s)


async def read_chat(
    context: Context,
    request: Request,
    parse: Callable[[bytes, Defaults], ChatInput],
    recall: Callable[[bytes], bytes] | None = None,
) -> ChatInput:
    """Read a body that asks for a chat; another process converts a long one to token ids.

    Args:
        context, request: as for all routes.
        parse: decodes a body.
        recall: completes one by what was kept of earlier ones, in the pool.

    Raises:
        OctavoError, ApiError: the body is refused, or there is no room for what it asks.
    """
    body = await context.read_body(request)
    if recall is not None:
        body = await context.run(request, recall, body)
    if len(body) > LONG_BYTES:
        found = await while_present(request, context.read_long_chat(request, body))
    else:
        found = parse(body, context.defaults)
        check_model(getattr(found.fields, "model", None), context.model)
    note_left_out(request, (*found.left_out, *_without_switch(context, found)))
    context.check_room(found.params.n)
    return found


def _without_switch(context: Context, found: ChatInput) -> tuple[str, ...]:
    """Return the wish for reasoning that is left out because the model's template has no switch for it."""
    materials, (effort, thinks) = context.materials, wish_of(found.chat)
    if (effort, thinks) == (None, None) or wished_variables(materials.prompts, found.chat, materials.formats):
        return ()
    return ("thinking" if effort is None else "reasoning effort",)


async def begin_chat(context: Context, request: Request, found: ChatInput) -> tuple[Generation, Toolbox]:
    """Read a chat's tools and prompt and submit it; return the tools with what the prompt opened.

    Raises:
        OctavoError, ApiError: as read_prompt and Context.generate.
    """
    chat, prepared = found.chat, found.prepared
    if prepared is None:
        materials = context.materials
        prepared = await context.run(
            request, read_prompt, materials.prompts, chat, materials.formats, reading_of(chat), found.params
        )
    prompt, box, params = prepared
    check_logprobs([prompt], params, context.engine.prompts.max_model_len, num_copies=1)
    salt = context.salt(request, chat.cache_salt)
    client = request.scope["octavo.holder"] or request.headers.get("user-agent")
    context.watch.note((client, salt), prompt)
    generation = await context.generate(
        [prompt],
        params,
        cache_salt=salt,
        priority=chat.priority or 0,
        keep_cached=asks_to_keep(found.left_out),
    )
    return generation, box


async def answer_whole(
    context: Context, request: Request, found: ChatInput, write: Callable[[RequestOutput, Toolbox], Written]
) -> Written:
    """Submit a chat and wait for its end; return what `write` makes of the whole answer.

    Raises:
        OctavoError, ApiError: as begin_chat and Generation.finish.
        ClientGoneError: the client has left.
    """

    async def work() -> Written:
        generation, box = await begin_chat(context, request, found)
        outputs = await generation.finish()
        # This runs in the pool, because the text may be long, or made to be slow to parse.
        return await context.run(request, write, outputs[0], box)

    return await while_present(request, work())


def _completion(answer: Answer, parts: Parts, output: RequestOutput, box: Toolbox) -> ChatCompletion:
    fields = answer.request
    choices = []
    for completion in output.outputs:
        message, finish_reason = whole_message(completion, box.reader(), parallel=box.parallel)
        choice = ChatChoice(
            index=completion.index,
            message=message,
            logprobs=answer.logprobs_of(completion, parts),
            finish_reason=finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if fields.return_token_ids else UNSET,
        )
        choices.append(choice)
    wants_prompt = fields.prompt_logprobs is not None and output.prompt_logprobs is not None
    return ChatCompletion(
        id=answer.id,
        created=answer.created,
        model=answer.model,
        choices=choices,
        usage=usage_of([output]),
        prompt_logprobs=parts.later(prompt_logprobs(output.prompt_logprobs or [])) if wants_prompt else UNSET,
        prompt_token_ids=output.prompt_token_ids if fields.return_token_ids else UNSET,
    )


class ChatEvents(AnswerEvents):
    """Writes a streamed answer: roles, what is new, and the usage."""

    def __init__(self, answer: Answer, generation: Generation, box: Toolbox, n: int) -> None:
        fields = answer.request
        super().__init__(fields, generation)
        self._answer = answer
        self._first_ids = generation.prompts[0].listed if fields.return_token_ids else UNSET
        self._has_role = [False] * n
        # An event with more than text is encoded as a whole.
        self._has_more = self._usage.is_continuous or bool(fields.return_token_ids)
        self._texts = TextEvents(
            lambda index, text: self._chunk([ChunkChoice(index=index, delta=Delta(content=text))])
        )
        readers = [box.reader() for _ in range(n)]
        self._writers = [DeltaWriter(reader, parallel=box.parallel) for reader in readers]
        self._is_plain = not self._has_more and readers[0] is None

    def _event(self, position: int, delta: CompletionDelta) -> bytes:
        before = b"" if self._has_role[delta.index] else self._role(delta.index)
        self._usage.add(len(delta.token_ids))
        if self._is_plain and is_only_text(delta):
            return before + self._texts.write(delta.index, delta.text)
        shown, finish_reason = self._writers[delta.index].write(
            delta.text, delta.token_ids, delta.finish_reason
        )
        is_only_content = shown.content and not (shown.reasoning_content or shown.tool_calls)
        if not self._has_more and is_only_text(delta) and is_only_content:
            return before + self._texts.write(delta.index, shown.content or "")
        choice = _choice(self._answer, delta, shown, finish_reason)
        return before if choice is None else before + self._chunk([choice], self._usage.now)

    def _usage_event(self, usage: Usage) -> bytes:
        return self._chunk([], usage)

    def _role(self, index: int) -> bytes:
        """Return a completion's first event; the answer's very first has the prompt's ids."""
        self._has_role[index] = True
        role = ChunkChoice(index=index, delta=Delta(role="assistant", content=""))
        ids, self._first_ids = self._first_ids, UNSET
        return self._chunk([role], self._usage.now, ids)

    def _chunk(
        self,
        choices: list[ChunkChoice],
        usage: Usage | UnsetType = UNSET,
        ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        answer = self._answer
        return event(
            ChatChunk(
                id=answer.id,
                created=answer.created,
                model=answer.model,
                choices=choices,
                usage=usage,
                prompt_token_ids=ids,
            )
        )


def _choice(
    answer: Answer, delta: CompletionDelta, shown: Delta, finish_reason: str | None
) -> ChunkChoice | None:
    """Return what is new, or None if a client would see nothing in it."""
    fields = answer.request
    if is_empty(shown) and not (finish_reason or delta.logprobs or fields.return_token_ids):
        return None
    return ChunkChoice(
        index=delta.index,
        delta=shown,
        logprobs=answer.logprobs_of(delta),
        finish_reason=finish_reason,
        stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
        token_ids=delta.token_ids if fields.return_token_ids else UNSET,
    )
