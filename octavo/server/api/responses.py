"""POST /v1/responses: the part that needs no memory. Input and output are text; nothing is stored."""

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.prompts import TokenIds
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.api.decode import decode
from octavo.server.api.prompts import Prompts, Reading
from octavo.server.api.response_types import (
    InputDetails,
    OutputDetails,
    OutputMessage,
    OutputText,
    Reason,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from octavo.server.api.sse import encode
from octavo.server.api.usage import usage_of
from octavo.server.context import Context, new_id
from octavo.server.errors import ApiError, refused
from octavo.server.generation import Generation
from octavo.server.limits import unless_gone

_PARTS = ("input_text", "output_text", "text")


async def responses(context: Context, request: Request) -> Response:
    """Answer an input."""
    body = await context.bodies.read(request.scope["headers"], request.receive)
    asked = decode(body, ResponsesRequest)
    context.check_model(asked.model)
    if asked.top_logprobs:
        raise refused("top_logprobs", "is not supported here; use /v1/chat/completions")
    prompts = Prompts(context.engine.prompts)
    params = _params(asked)
    context.loop.check_room(params)

    async def generate() -> Generation:
        prompt = await context.run(_read, prompts, asked)
        salt = context.salt(request, asked.cache_salt)
        return await context.generate([prompt], params, cache_salt=salt, priority=asked.priority or 0)

    answer = ResponseObject(
        id=new_id("resp", request, asked.request_id),
        created_at=int(time.time()),
        model=context.model,
        status="in_progress",
        output=[],
        instructions=asked.instructions,
        metadata=asked.metadata or {},
        max_output_tokens=asked.max_output_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
    )
    if asked.stream:
        generation = await unless_gone(request.receive, generate())
        return context.events(_events(answer, generation), generation, last=b"", write_error=_error_event)

    async def whole() -> Response:
        output = (await (await generate()).finish())[0]
        return Response(encode(_finished(answer, output)), media_type="application/json")

    return await unless_gone(request.receive, whole())


def _params(asked: ResponsesRequest) -> SamplingParams:
    options: dict[str, Any] = {"max_tokens": asked.max_output_tokens}
    for name in ("temperature", "top_p"):
        if getattr(asked, name) is not None:
            options[name] = getattr(asked, name)
    return SamplingParams(**options)


def _read(prompts: Prompts, asked: ResponsesRequest) -> TokenIds:
    messages: list[dict[str, Any]] = []
    if asked.instructions is not None:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        messages.append({"role": "user", "content": asked.input})
    else:
        messages += [_message(item, f"input[{index}]") for index, item in enumerate(asked.input)]
    return prompts.read_chat(messages, Reading())


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    """Return an item of the input as a chat's message."""
    if item.get("type", "message") != "message":
        raise ApiError(400, f"{where}: only messages are supported, got {item['type']!r}", param=where)
    known = {"type", "id", "status", "role", "content"}
    unknown = sorted(name for name in item if name not in known)
    if unknown:
        raise ApiError(400, f"{where}: unknown field {unknown[0]!r}", param=where, code="unknown_field")
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
    return {"role": item.get("role"), "content": content}


def _part(part: object, where: str) -> dict[str, Any]:
    if not isinstance(part, dict) or part.get("type") not in _PARTS:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise ApiError(400, f"{where}: only text is supported, got {kind!r}", param=where)
    return {"type": "text", "text": part.get("text")}


def _item(answer: ResponseObject, text: str, status: str) -> OutputMessage:
    return OutputMessage(id=f"msg-{answer.id}", status=status, content=[OutputText(text=text)])


def _finished(answer: ResponseObject, output: RequestOutput) -> ResponseObject:
    usage = usage_of([output])
    completion = output.outputs[0]
    status = "completed" if completion.finish_reason == "stop" else "incomplete"
    reason = {"length": "max_output_tokens", "abort": "abort"}.get(completion.finish_reason or "abort")
    return msgspec.structs.replace(
        answer,
        status=status,
        output=[_item(answer, completion.text, status)],
        incomplete_details=Reason(reason) if reason else None,
        usage=ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(output.num_cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(),
            total_tokens=usage.total_tokens,
        ),
    )


async def _events(answer: ResponseObject, generation: Generation) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer, numbered."""
    number = -1

    def event(type_: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return _event(ResponseEvent(type=type_, sequence_number=number, **fields))

    item = _item(answer, "", "in_progress")
    where = {"item_id": item.id, "output_index": 0, "content_index": 0}
    opening = msgspec.structs.replace(item, content=[])
    yield event("response.created", response=answer) + event("response.in_progress", response=answer)
    yield event("response.output_item.added", output_index=0, item=opening)
    yield event("response.content_part.added", part=OutputText(text=""), **where)
    async for _, deltas in generation.deltas():
        for delta in deltas:
            if delta.text:
                yield event("response.output_text.delta", delta=delta.text, logprobs=[], **where)
    done = _finished(answer, generation.outputs[0])
    text = done.output[0].content[0]
    yield event("response.output_text.done", text=text.text, logprobs=[], **where)
    yield event("response.content_part.done", part=text, **where)
    yield event("response.output_item.done", output_index=0, item=done.output[0])
    yield event(f"response.{done.status}", response=done)


def _event(value: ResponseEvent) -> bytes:
    return f"event: {value.type}\n".encode() + b"data: " + encode(value) + b"\n\n"


def _error_event(error: ApiError) -> bytes:
    detail = error.detail
    return _event(
        ResponseEvent(
            type="error", sequence_number=0, code=detail.code, message=detail.message, param=detail.param
        )
    )
