"""Converts one message of /v1/messages, a list of blocks, to the messages of a chat."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.server.api.anthropic.messages_structs import (
    AnyBlock,
    DocumentBlock,
    MessageParam,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    part,
)
from octavo.server.api.anthropic.signature import carried
from octavo.server.api.structs import JsonObject
from octavo.server.api_errors import ApiError, refused_part
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
    """Reads one request's messages; `loaded` are descriptions of tools, for blocks that refer to them."""

    loaded: Mapping[str, str]

    def turns(self, message: MessageParam, where: str) -> Iterator[JsonObject]:
        """Yield the chat messages that one message becomes: each tool's result is a message of its own.

        Raises:
            ApiError: a block is of a kind that is not supported there.
        """
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
            return
        where, turn = f"{where}.content", list[AnyBlock]()
        if not message.content and message.role != "assistant":
            raise ApiError(400, f"{where}: expected a block or more, got none", param=where)
        # The assistant may have said nothing.
        texts, owes_turn = list[str](), message.role == "assistant"
        for place, block in _blocks(message.content, where, message.role):
            if isinstance(block, ToolResultBlock):
                if turn:  # what the assistant said before a server gave it this result
                    yield _turn(turn)
                turn, owes_turn = [], False
                text = self.text(block.content, f"{place}.content", "tool_result")
                content = f"Error: {text}" if block.is_error else text
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            elif message.role == "assistant":
                turn.append(block)
            else:
                texts.append(self._shown(block, place))
        if turn or owes_turn:
            yield _turn(turn)
        if texts:
            yield {"role": message.role, "content": "\n".join(texts)}

    def text(self, content: str | Sequence[JsonObject], where: str, place: str) -> str:
        """Return the text of a content, which belongs to a system, tool_result or document.

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
        text = source.get({"text": "data", "content": "content"}.get(str(kind), ""))
        if isinstance(text, list) and all(isinstance(block, dict) for block in text):
            return self.text(text, f"{where}.content", "document")
        if isinstance(text, str):
            return text
        text = f"expected plain text in a source of type text or content, got {kind!r:.100}"
        raise refused_part(where, "file", text)


def _turn(blocks: Sequence[AnyBlock]) -> JsonObject:
    """Return the assistant's turn."""
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


def _blocks(content: Sequence[JsonObject], where: str, place: str) -> Iterator[tuple[str, AnyBlock]]:
    """Yield blocks with their places in the body; calls that a server ran are as any other."""
    for index, block in enumerate(content):
        spot, kind = f"{where}[{index}]", block.get("type")
        if place == "assistant" and kind in ("server_tool_use", "mcp_tool_use"):
            kind = "tool_use"
        elif place == "assistant" and isinstance(kind, str) and kind.endswith("_tool_result"):
            kind, block = "tool_result", {**block, "content": _written(block.get("content"))}
        elif kind not in _KINDS[place]:
            text = f"expected a block of type {' or '.join(_KINDS[place])}, got {kind!r}"
            raise refused_part(spot, kind, text)
        if kind not in _SILENT:
            yield spot, part({**block, "type": kind}, AnyBlock, spot)


def _written(content: Any) -> str:
    """Return a server's result as text, without what only that server can read."""
    lines = []
    for item in content if isinstance(content, list) else [content]:
        kept = {n: v for n, v in item.items() if n[:9] != "encrypted"} if isinstance(item, dict) else item
        text = kept.get("text") if isinstance(kept, dict) else kept
        lines.append(text if isinstance(text, str) else encoded(kept).decode())
    return "\n".join(lines)
