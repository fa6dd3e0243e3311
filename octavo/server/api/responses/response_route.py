"""POST /v1/responses: text and calls."""

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.outputs import CompletionDelta, RequestOutput
from octavo.server.api.chat import answer_whole, begin_chat, read_chat
from octavo.server.api.responses.response_input import format_of, parse_response
from octavo.server.api.responses.response_items import new_writer, whole_items
from octavo.server.api.responses.response_store import Memory
from octavo.server.api.responses.response_structs import (
    InputDetails,
    OutputDetails,
    OutputItem,
    Reason,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    TextOptions,
)
from octavo.server.api.responses.response_tools import names_of
from octavo.server.api.sse import EventWriter, json_response, named_event
from octavo.server.api.tools.toolbox import Toolbox
from octavo.server.api_errors import ApiError
from octavo.server.context import Context, new_id
from octavo.server.generation import Generation, usage_of
from octavo.server.limits import while_present


async def responses(context: Context, request: Request) -> Response:
    """Answer an input."""
    store = context.store
    memory = None if store is None else Memory(store, request.scope["octavo.holder"])
    found = await read_chat(context, request, parse_response, None if memory is None else memory.recall)
    fields, params = found.fields, found.params
    assert isinstance(fields, ResponsesRequest)
    answer = ResponseObject(
        id=new_id("resp", request, fields.request_id),
        created_at=int(time.time()),
        model=context.model,
        status="in_progress",
        output=[],
        instructions=fields.instructions,
        metadata=fields.metadata or {},
        max_output_tokens=fields.max_output_tokens,
        temperature=params.temperature,
        reasoning=fields.reasoning,
        text=TextOptions(format=format_of(fields)),
        top_p=params.top_p,
        tools=fields.tools or [],
        tool_choice=fields.tool_choice or "auto",
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        **({} if memory is None else memory.note()),
    )
    options = {"names": names_of(fields.tools or ()), "seals": bool(fields.include)}
    if fields.stream:
        generation, box = await while_present(request, begin_chat(context, request, found))
        events = _Events(answer, generation, box, options, memory)
        return context.events(events, generation, last=b"", write_error=events.fail)
    finished = await answer_whole(context, request, found, partial(_whole, answer, options))
    if memory is not None:
        memory.keep(finished)
    return json_response(finished)


def _whole(
    answer: ResponseObject, options: dict[str, Any], output: RequestOutput, box: Toolbox
) -> ResponseObject:
    return _finished(answer, output, whole_items(box, output.outputs[0], _status(output), **options))


def _status(output: RequestOutput) -> str:
    return "completed" if output.outputs[0].finish_reason == "stop" else "incomplete"


def _finished(answer: ResponseObject, output: RequestOutput, items: list[OutputItem]) -> ResponseObject:
    usage = usage_of([output])
    reason = {"length": "max_output_tokens", "abort": "abort"}.get(output.outputs[0].finish_reason or "abort")
    return msgspec.structs.replace(
        answer,
        status=_status(output),
        output=items,
        incomplete_details=Reason(reason) if reason else None,
        usage=ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(output.num_cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(),
            total_tokens=usage.total_tokens,
        ),
    )


class _Events(EventWriter):
    """Writes a streamed answer as events with numbers."""

    def __init__(
        self,
        answer: ResponseObject,
        generation: Generation,
        box: Toolbox,
        options: dict[str, Any],
        memory: Memory | None,
    ) -> None:
        self._memory = memory
        self._answer = answer
        self._generation = generation
        self._reader, self._writer = new_writer(box, **options)
        self._number = -1

    def begin(self) -> bytes:
        """Return the events that begin the answer."""
        kinds = ("response.created", "response.in_progress")
        return self._written(ResponseEvent(type=kind, response=self._answer) for kind in kinds)

    def write(self, position: int, deltas: list[CompletionDelta]) -> bytes:
        """Return events of new deltas."""
        feed, write = self._reader.feed, self._writer.write
        return b"".join(self._written(write(feed(delta.text, delta.token_ids))) for delta in deltas)

    def finish(self) -> bytes:
        """Return the events of the last items and of the whole answer."""
        output, writer = self._generation.outputs[0], self._writer
        events = writer.write(self._reader.finish()) + writer.finish(_status(output))
        done = _finished(self._answer, output, writer.items)
        if self._memory is not None:
            self._memory.keep(done)
        return self._written([*events, ResponseEvent(type=f"response.{done.status}", response=done)])

    def fail(self, error: ApiError) -> bytes:
        """Return the events of a failure: Codex reads the first, OpenAI's client the second."""
        detail = error.detail
        failure = ResponseFailure(detail.code or "server_error", detail.message)
        failed = msgspec.structs.replace(
            self._answer, status="failed", error=failure, output=self._writer.items
        )
        told = ResponseEvent(type="error", code=detail.code, message=detail.message, param=detail.param)
        return self._written([ResponseEvent(type="response.failed", response=failed), told])

    def _written(self, events: Iterable[ResponseEvent]) -> bytes:
        parts = []
        for event in events:
            self._number += 1
            event.sequence_number = self._number
            parts.append(named_event(event.type, event))
        return b"".join(parts)
