"""From the items of an answer to Anthropic's blocks, events and errors."""

from collections.abc import Iterable
from typing import Any

import msgspec

from octavo.errors import NotReadyError
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.server.api.anthropic.types import (
    Ending,
    MessageUsage,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from octavo.server.api.responses.types import FunctionCallItem, OutputItem, ReasoningItem, ResponseEvent
from octavo.server.api.sse import named_event

# What a delta of an item is called, and its field.
_DELTAS = {
    "response.output_text.delta": ("text_delta", "text"),
    "response.reasoning_text.delta": ("thinking_delta", "thinking"),
    "response.function_call_arguments.delta": ("input_json_delta", "partial_json"),
}


def event(kind: str, **fields: Any) -> bytes:
    """Return one event."""
    return named_event(kind, {"type": kind, **fields})


def block_events(events: Iterable[ResponseEvent]) -> bytes:
    """Translate events of /v1/responses to events of the same blocks."""
    written = []
    for told in events:
        if told.type in _DELTAS:
            kind, field = _DELTAS[told.type]
            delta = {"type": kind, field: told.delta}
            written.append(event("content_block_delta", index=told.output_index, delta=delta))
        elif told.type == "response.output_item.added":
            block = _block(told.item, is_open=True)
            written.append(event("content_block_start", index=told.output_index, content_block=block))
        elif told.type == "response.output_item.done":
            written.append(event("content_block_stop", index=told.output_index))
    return b"".join(written)


def blocks_of(items: Iterable[OutputItem]) -> list[TextBlock | ThinkingBlock | ToolUseBlock]:
    """Return a whole answer's items as blocks."""
    return [_block(item, is_open=False) for item in items]


def ending(completion: CompletionOutput, items: Iterable[OutputItem]) -> Ending:
    """Return why an answer ended.

    Raises:
        NotReadyError: the server is stopping and has aborted the answer.
    """
    if completion.finish_reason == "abort":
        raise NotReadyError("the server stops, and has broken off this answer")
    if completion.finish_reason == "length":
        return Ending("max_tokens")
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


def _block(item: Any, *, is_open: bool) -> TextBlock | ThinkingBlock | ToolUseBlock:
    """Return an item as a block; one that is open has no content yet."""
    if isinstance(item, FunctionCallItem):
        arguments = {} if is_open else msgspec.json.decode(item.arguments)
        return ToolUseBlock(id=item.call_id, name=item.name, input=arguments)
    text = "" if is_open else item.content[0].text
    if isinstance(item, ReasoningItem):
        return ThinkingBlock(thinking=text, signature="")
    return TextBlock(text=text)
