"""POST /v1/messages: converts the items of an answer to Anthropic's blocks and events."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import NotReadyError
from octavo.outputs import CompletionDelta, CompletionOutput, RequestOutput
from octavo.server.api.anthropic.messages_input import parse_messages
from octavo.server.api.anthropic.messages_structs import (
    Ending,
    Message,
    MessagesRequest,
    MessageUsage,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    error_event,
)
from octavo.server.api.anthropic.signature import signed
from octavo.server.api.chat import answer_whole, begin_chat, read_chat
from octavo.server.api.responses.response_items import new_writer, whole_items
from octavo.server.api.responses.response_structs import (
    FunctionCallItem,
    OutputItem,
    ReasoningItem,
    ResponseEvent,
)
from octavo.server.api.sse import EventWriter, json_response, named_event
from octavo.server.api.tools.toolbox import Toolbox
from octavo.server.context import Context, new_id
from octavo.server.generation import Generation
from octavo.server.limits import while_present

# Anthropic's name for the delta of each kind of item, and for its field.
_DELTAS = {
    "response.output_text.delta": ("text_delta", "text"),
    "response.reasoning_text.delta": ("thinking_delta", "thinking"),
    "response.function_call_arguments.delta": ("input_json_delta", "partial_json"),
}


def event(kind: str, **fields: Any) -> bytes:
    """Return one event."""
    return named_event(kind, {"type": kind, **fields})


def block_events(events: Iterable[ResponseEvent], *, hides: bool = False) -> bytes:
    """Translate events of /v1/responses to events of the same blocks; `hides`: thinking is in signatures."""
    written = []
    for found in events:
        tell = partial(event, index=found.output_index)
        if found.type in _DELTAS:
            kind, field = _DELTAS[found.type]
            if not (hides and field == "thinking"):
                written.append(tell("content_block_delta", delta={"type": kind, field: found.delta}))
        elif found.type == "response.output_item.added":
            written.append(tell("content_block_start", content_block=_block(found.item, is_open=True)))
        elif found.type == "response.output_item.done":
            if isinstance(found.item, ReasoningItem):
                signature = signed(found.item.content[0].text, carries=hides)
                delta = {"type": "signature_delta", "signature": signature}
                written.append(tell("content_block_delta", delta=delta))
            written.append(tell("content_block_stop"))
    return b"".join(written)


def blocks_of(
    items: Iterable[OutputItem], *, hides: bool = False
) -> list[TextBlock | ThinkingBlock | ToolUseBlock]:
    """Return a whole answer's items as blocks."""
    return [_block(item, hides=hides) for item in items]


def ending(completion: CompletionOutput, items: Iterable[OutputItem], max_tokens: int = 0) -> Ending:
    """Return why an answer of at most `max_tokens` ended.

    Raises:
        NotReadyError: the server is stopping and has aborted the answer.
    """
    if completion.finish_reason == "abort":
        raise NotReadyError("the server stops, and has broken off this answer")
    if completion.finish_reason == "length":
        was_allowed_more = len(completion.token_ids) < max_tokens
        return Ending("model_context_window_exceeded" if was_allowed_more else "max_tokens")
    if any(isinstance(item, FunctionCallItem) and item.status == "completed" for item in items):
        return Ending("tool_use")
    if isinstance(completion.stop_reason, str):
        return Ending("stop_sequence", completion.stop_reason)
    return Ending("end_turn")


def usage_of(output: RequestOutput) -> MessageUsage:
    """Return the tokens of a finished answer."""
    return MessageUsage(
        input_tokens=len(output.prompt_token_ids) - output.num_cached_tokens,
        cache_read_input_tokens=output.num_cached_tokens,
        output_tokens=len(output.outputs[0].token_ids),
    )


def _block(
    item: Any, *, is_open: bool = False, hides: bool = False
) -> TextBlock | ThinkingBlock | ToolUseBlock:
    """Return an item as a block; one that is open has no content yet."""
    if isinstance(item, FunctionCallItem):
        arguments = {} if is_open else msgspec.json.decode(item.arguments)
        return ToolUseBlock(id=item.call_id, name=item.name, input=arguments)
    text = "" if is_open else item.content[0].text
    if isinstance(item, ReasoningItem):
        signature = "" if is_open else signed(text, carries=hides)
        return ThinkingBlock(thinking="" if hides else text, signature=signature)
    return TextBlock(text=text)


def _hides_thinking(fields: MessagesRequest) -> bool:
    return fields.thinking is not None and fields.thinking.display == "omitted"


def _asks_for_thinking(fields: MessagesRequest) -> bool:
    """Return whether blocks of thinking may come: clients that ask for none read the first block as text."""
    return fields.thinking is not None and fields.thinking.type != "disabled"


async def messages(context: Context, request: Request) -> Response:
    """Answer a conversation."""
    found = await read_chat(context, request, parse_messages)
    fields = found.fields
    assert isinstance(fields, MessagesRequest)
    answer = Message(id=new_id("msg", request, None), model=context.model, usage=MessageUsage(input_tokens=0))
    if fields.stream:
        generation, box = await while_present(request, begin_chat(context, request, found))
        return context.events(
            _Events(answer, generation, box, fields),
            generation,
            last=b"",
            idle=event("ping"),
            write_error=error_event,
        )
    message = await answer_whole(context, request, found, partial(_whole, answer, fields))
    return json_response(message)


def _whole(answer: Message, fields: MessagesRequest, output: RequestOutput, box: Toolbox) -> Message:
    completion = output.outputs[0]
    items = whole_items(box, completion, "completed", shows_reasoning=_asks_for_thinking(fields))
    ended = ending(completion, items, fields.max_tokens)
    return msgspec.structs.replace(
        answer,
        content=blocks_of(items, hides=_hides_thinking(fields)),
        stop_reason=ended.stop_reason,
        stop_sequence=ended.stop_sequence,
        usage=usage_of(output),
    )


class _Events(EventWriter):
    """Writes a streamed answer."""

    def __init__(
        self, answer: Message, generation: Generation, box: Toolbox, fields: MessagesRequest
    ) -> None:
        self._answer = answer
        self._max_tokens, self._hides = fields.max_tokens, _hides_thinking(fields)
        self._generation = generation
        self._reader, self._writer = new_writer(box, shows_reasoning=_asks_for_thinking(fields))

    def begin(self) -> bytes:
        """Return the event that begins the message."""
        self._answer.usage.input_tokens = len(self._generation.prompts[0].listed)
        return event("message_start", message=self._answer)

    def write(self, position: int, deltas: list[CompletionDelta]) -> bytes:
        """Return events of new deltas."""
        feed, write = self._reader.feed, self._writer.write
        found = (write(feed(delta.text, delta.token_ids)) for delta in deltas)
        return b"".join(block_events(events, hides=self._hides) for events in found)

    def finish(self) -> bytes:
        """Return the events that end the last block and the message."""
        output, writer = self._generation.outputs[0], self._writer
        last = writer.write(self._reader.finish()) + writer.finish("completed")
        events = block_events(last, hides=self._hides)
        ended = ending(output.outputs[0], writer.items, self._max_tokens)
        return events + event("message_delta", delta=ended, usage=usage_of(output)) + event("message_stop")
