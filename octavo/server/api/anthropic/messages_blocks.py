"""Converts one message of /v1/messages, a list of blocks, to the messages of a chat."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.server.api.anthropic.messages_structs import (
    AnyBlock,
    DocumentBlock,
    MessageParam,
    SearchResultBlock,
    ServerResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    part,
)
from octavo.server.api.anthropic.signature import carried
from octavo.server.api.structs import JsonObject
from octavo.server.api_errors import ApiError
from octavo.tokenizer.messages import encoded

# These say where an answer changed models, and hold thoughts that only Anthropic can read.
_SILENT = ("fallback", "redacted_thinking")
_READABLE = ("text", "document", "search_result")
_KINDS = {
    "system": ("text",),
    "user": (*_READABLE, "tool_result"),
    "assistant": ("text", "thinking", "tool_use", *_SILENT),
    "tool_result": (*_READABLE, "tool_reference"),
    "document": ("text",),
}


@dataclass(frozen=True, slots=True)
class BlockReader:
    """Reads the messages of one request.

    Attributes:
        loaded: descriptions of tools, by name, that the model is shown where a block refers to them.
    """

    loaded: Mapping[str, str]

    def turns(self, message: MessageParam, where: str) -> Iterator[JsonObject]:
        """Yield the chat messages that one message becomes: each tool's result is a message of its own.

        Args:
            message: it.
            where: its place in the body.

        Raises:
            ApiError: a block is of a kind that is not supported there.
        """
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
            return
        where = f"{where}.content"
        if message.role == "assistant":
            yield from _assistant([block for _, block in _blocks(message.content, where, "assistant")])
            return
        if not message.content:
            raise ApiError(400, f"{where}: expected a block or more, got none", param=where)
        texts = []
        for place, block in _blocks(message.content, where, message.role):
            if isinstance(block, ToolResultBlock):
                text = self.text(block.content, f"{place}.content", "tool_result")
                content = f"Error: {text}" if block.is_error else text
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            else:
                texts.append(self._shown(block, place))
        if texts:
            yield {"role": message.role, "content": "\n".join(texts)}

    def text(self, content: str | Sequence[JsonObject], where: str, place: str) -> str:
        """Return the text of a content.

        Args:
            content: a text or blocks.
            where: its place in the body.
            place: what it belongs to: system, tool_result or document.

        Raises:
            ApiError: a block is of a kind that is not supported there.
        """
        if isinstance(content, str):
            return content
        return "\n".join(self._shown(block, spot) for spot, block in _blocks(content, where, place))

    def _shown(self, block: AnyBlock, where: str) -> str:
        """Return what a model reads of a block that is no call."""
        if isinstance(block, ToolReferenceBlock):
            return self.loaded.get(block.tool_name, f"The tool {block.tool_name} can be called")
        if isinstance(block, SearchResultBlock):
            text = self.text(block.content, f"{where}.content", "document")
            return "\n".join((block.title, block.source, text))
        if isinstance(block, DocumentBlock):
            text = self._source(block.source, f"{where}.source")
            return "\n".join(filter(None, (block.title, block.context, text)))
        assert isinstance(block, TextBlock)
        return block.text

    def _source(self, source: JsonObject, where: str) -> str:
        kind = source.get("type")
        text = source.get("data") if kind == "text" else source.get("content") if kind == "content" else None
        if isinstance(text, list) and all(isinstance(block, dict) for block in text):
            return self.text(text, f"{where}.content", "document")
        if not isinstance(text, str):
            shown = (
                f"{where}: expected a source of type text or content, got {kind!r}: only plain text is read"
            )
            raise ApiError(400, shown[:400], param=where)
        return text


def _assistant(blocks: Sequence[AnyBlock]) -> Iterator[JsonObject]:
    """Yield the assistant's turn, which each result of a server's tool ends; a new one follows it."""
    turn: list[AnyBlock] = []
    for block in blocks:
        if not isinstance(block, ServerResultBlock):
            turn.append(block)
            continue
        if turn:
            yield _turn(turn)
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _written(block.content)}
        turn = []
    if turn or not blocks:
        yield _turn(turn)


def _turn(blocks: Sequence[AnyBlock]) -> JsonObject:
    text = "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
    thoughts = [b.thinking or carried(b.signature or "") for b in blocks if isinstance(b, ThinkingBlock)]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(filter(None, thoughts))
    if calls:
        message["tool_calls"] = calls
    return message


def _written(content: Any) -> str:
    """Return a server's result as text, without what only that server can read."""
    if isinstance(content, str):
        return content
    items = [
        {name: value for name, value in item.items() if not name.startswith("encrypted")}
        if isinstance(item, dict)
        else item
        for item in (content if isinstance(content, list) else [content])
    ]
    texts = [item["text"] for item in items if isinstance(item, dict) and isinstance(item.get("text"), str)]
    if len(texts) == len(items):
        return "\n".join(texts)
    return encoded(items if isinstance(content, list) else items[0]).decode()


def _blocks(content: Sequence[JsonObject], where: str, place: str) -> Iterator[tuple[str, AnyBlock]]:
    """Yield blocks with their places in the body."""
    for index, block in enumerate(content):
        spot = f"{where}[{index}]"
        kind = _kind(block.get("type"), place, spot)
        if kind not in _SILENT:
            yield spot, part({**block, "type": kind}, AnyBlock, spot)


def _kind(found: object, place: str, where: str) -> str:
    """Return a block's type; calls and results of a server's tools have one each."""
    kind = found if isinstance(found, str) else ""
    if place == "assistant" and kind in ("server_tool_use", "mcp_tool_use"):
        return "tool_use"
    if place == "assistant" and kind.endswith("_tool_result"):
        return "server_tool_result"
    if kind not in _KINDS[place]:
        text = f"{where}: expected a block of type {' or '.join(_KINDS[place])}, got {found!r}"
        raise ApiError(400, text[:400], param=where)
    return kind
