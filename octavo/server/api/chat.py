"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.prompts import TokenIds
from octavo.outputs import CompletionDelta, CompletionOutput, RequestOutput
from octavo.server.api.decode import decode
from octavo.server.api.logprobs import LogprobWriter, prompt_logprobs
from octavo.server.api.prompts import Prompts, Reading
from octavo.server.api.sampling import chat_params
from octavo.server.api.sse import Gathered, encode, event
from octavo.server.api.types import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    Delta,
    SamplingFields,
    Usage,
)
from octavo.server.api.usage import UsageCounter, usage_of
from octavo.server.context import Context, new_id
from octavo.server.generation import Generation
from octavo.server.limits import unless_gone


@dataclass(frozen=True, slots=True)
class _Answer:
    """What every part of an answer needs."""

    id: str
    created: int
    model: str
    request: ChatRequest
    logprobs: LogprobWriter

    def logprobs_of(self, part: CompletionOutput | CompletionDelta) -> ChatLogprobs | None:
        return None if part.logprobs is None else self.logprobs.chat(part.token_ids, part.logprobs)


async def chat_completions(context: Context, request: Request) -> Response:
    """Answer a conversation."""
    body = await context.bodies.read(request.scope["headers"], request.receive)
    asked = decode(body, ChatRequest)
    del body
    context.check_model(asked.model)
    prompts = Prompts(context.engine.prompts)
    params = chat_params(asked)
    context.loop.check_room(params)
    answer = _Answer(
        new_id("chatcmpl", request, asked.request_id),
        int(time.time()),
        context.model,
        asked,
        LogprobWriter(
            context.loop.engine.tokenizer,
            asked.top_logprobs or 0,
            ids_as_tokens=bool(asked.return_tokens_as_token_ids),
        ),
    )

    async def generate() -> Generation:
        prompt = await context.run(read_prompt, prompts, asked)
        salt = context.salt(request, asked.cache_salt)
        return await context.generate([prompt], params, cache_salt=salt, priority=asked.priority or 0)

    if asked.stream:
        generation = await unless_gone(request.receive, generate())
        return context.events(_events(answer, generation, params.n), generation)

    async def whole() -> Response:
        outputs = await (await generate()).finish()
        return Response(encode(_completion(answer, outputs[0])), media_type="application/json")

    return await unless_gone(request.receive, whole())


def read_prompt(prompts: Prompts, asked: ChatRequest) -> TokenIds:
    """Render and tokenize the conversation."""
    variables = dict(asked.chat_template_kwargs or {})
    if asked.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", asked.reasoning_effort)
    return prompts.read_chat(
        asked.messages,
        reading_of(asked),
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        variables=variables,
    )


def reading_of(asked: SamplingFields) -> Reading:
    """Return how a request wants its prompts read."""
    return Reading(asked.add_special_tokens, asked.truncate_prompt_tokens, asked.truncation_side == "right")


def _completion(answer: _Answer, output: RequestOutput) -> ChatCompletion:
    asked = answer.request
    choices = [
        ChatChoice(
            index=completion.index,
            message=AnswerMessage(content=completion.text),
            logprobs=answer.logprobs_of(completion),
            finish_reason=completion.finish_reason or "abort",
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if asked.return_token_ids else UNSET,
        )
        for completion in output.outputs
    ]
    wants_prompt = asked.prompt_logprobs is not None and output.prompt_logprobs is not None
    return ChatCompletion(
        id=answer.id,
        created=answer.created,
        model=answer.model,
        choices=choices,
        usage=usage_of([output]),
        prompt_logprobs=prompt_logprobs(output.prompt_logprobs or []) if wants_prompt else UNSET,
        prompt_token_ids=output.prompt_token_ids if asked.return_token_ids else UNSET,
    )


async def _events(answer: _Answer, generation: Generation, n: int) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer: roles, what is new, and the usage."""
    asked = answer.request
    options = asked.stream_options
    usage = UsageCounter(generation, continuous=bool(options and options.continuous_usage_stats))
    gathered = Gathered(asked.stream_interval or 1)
    first_ids = generation.prompts[0].listed if asked.return_token_ids else UNSET
    has_role = [False] * n
    async for position, deltas in generation.deltas():
        events = []
        for delta in gathered.add(position, deltas):
            if not has_role[delta.index]:
                has_role[delta.index] = True
                role = ChunkChoice(index=delta.index, delta=Delta(role="assistant", content=""))
                events.append(_chunk(answer, [role], usage.now, first_ids))
                first_ids = UNSET
            usage.add(len(delta.token_ids))
            choice = _choice(answer, delta)
            if choice is not None:
                events.append(_chunk(answer, [choice], usage.now, UNSET))
        yield b"".join(events)
    if options is not None and options.include_usage:
        yield _chunk(answer, [], usage.final, UNSET)


def _choice(answer: _Answer, delta: CompletionDelta) -> ChunkChoice | None:
    """Return what is new, or None if a client would see nothing in it."""
    asked = answer.request
    if not (delta.text or delta.finish_reason or delta.logprobs or asked.return_token_ids):
        return None
    return ChunkChoice(
        index=delta.index,
        delta=Delta(content=delta.text),
        logprobs=answer.logprobs_of(delta),
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
        token_ids=delta.token_ids if asked.return_token_ids else UNSET,
    )


def _chunk(
    answer: _Answer, choices: list[ChunkChoice], usage: Usage | UnsetType, ids: list[int] | UnsetType
) -> bytes:
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
