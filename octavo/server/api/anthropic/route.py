"""POST /v1/messages and /v1/messages/count_tokens."""

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.outputs import CompletionDelta, RequestOutput
from octavo.server.api.anthropic.errors import error_event
from octavo.server.api.anthropic.input import counted, parse_messages
from octavo.server.api.anthropic.output import block_events, blocks_of, ending, event, usage_of
from octavo.server.api.anthropic.types import (
    Message,
    MessagesRequest,
    MessageUsage,
)
from octavo.server.api.chat import begin_chat, read_chat
from octavo.server.api.responses.output import new_writer, whole_items
from octavo.server.api.sse import EventWriter, encode
from octavo.server.api.tools.toolbox import Toolbox
from octavo.server.context import Context, new_id
from octavo.server.generation import Generation
from octavo.server.limits import while_present


async def messages(context: Context, request: Request) -> Response:
    """Answer a conversation."""
    found = await read_chat(context, request, parse_messages)
    asked = found.asked
    assert isinstance(asked, MessagesRequest)
    begin = partial(begin_chat, context, request, found)
    answer = Message(id=new_id("msg", request, None), model=context.model, usage=MessageUsage(input_tokens=0))
    if asked.stream:
        generation, box = await while_present(request, begin())
        return context.events(
            _Events(answer, generation, box),
            generation,
            last=b"",
            idle=event("ping"),
            write_error=error_event,
        )

    async def whole() -> Response:
        generation, box = await begin()
        output = (await generation.finish())[0]
        message = await context.run(request, _whole, answer, output, box)
        return Response(encode(message), media_type="application/json")

    return await while_present(request, whole())


async def count_tokens(context: Context, request: Request) -> Response:
    """Count the tokens of a conversation."""
    return await context.answer(request, counted)


def _whole(answer: Message, output: RequestOutput, box: Toolbox) -> Message:
    completion = output.outputs[0]
    items = whole_items(box, completion, "completed")
    ended = ending(completion, items)
    return msgspec.structs.replace(
        answer,
        content=blocks_of(items),
        stop_reason=ended.stop_reason,
        stop_sequence=ended.stop_sequence,
        usage=usage_of(output),
    )


class _Events(EventWriter):
    """Writes a streamed answer."""

    def __init__(self, answer: Message, generation: Generation, box: Toolbox) -> None:
        self._answer = answer
        self._generation = generation
        self._reader, self._writer = new_writer(box)

    def begin(self) -> bytes:
        """Return the event that begins the message."""
        self._answer.usage.input_tokens = len(self._generation.prompts[0].listed)
        return event("message_start", message=self._answer)

    def write(self, position: int, deltas: list[CompletionDelta]) -> bytes:
        """Return events of new deltas."""
        feed, write = self._reader.feed, self._writer.write
        return b"".join(block_events(write(feed(delta.text, delta.token_ids))) for delta in deltas)

    def finish(self) -> bytes:
        """Return the events that end the last block and the message."""
        output, writer = self._generation.outputs[0], self._writer
        events = block_events(writer.write(self._reader.finish()) + writer.finish("completed"))
        ended = ending(output.outputs[0], writer.items)
        return events + event("message_delta", delta=ended, usage=usage_of(output)) + event("message_stop")
