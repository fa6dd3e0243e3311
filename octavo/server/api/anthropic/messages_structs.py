"""Requests, answers and errors of /v1/messages. Imports nothing of the engine."""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from octavo.server.api.structs import MAX_MESSAGES, MAX_TOOLS, FunctionName, JsonObject, RequestBody, Stop
from octavo.server.api_errors import ApiError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class Block(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """A part of a message."""


class TextBlock(Block, tag="text"):
    """A text, of either side."""

    text: str


class ThinkingBlock(Block, tag="thinking"):
    """Reasoning. Nothing is signed, so the signature is empty, and none is checked."""

    thinking: str
    signature: str


class ToolUseBlock(Block, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: JsonObject


class ToolResultBlock(Block, tag="tool_result"):
    """The result of a call."""

    tool_use_id: str
    content: str | list[JsonObject] = ""
    is_error: bool = False


AnyBlock = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
# Blocks are read one by one, so that an error can name the wrong one.
Blocks = Annotated[list[JsonObject], Meta(min_length=1, max_length=MAX_MESSAGES)]


class MessageParam(Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    # The assistant may have said nothing.
    content: str | Annotated[list[JsonObject], Meta(max_length=MAX_MESSAGES)]


class ToolParam(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that may be called."""

    name: FunctionName
    input_schema: JsonObject
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class ToolChoiceParam(Struct, forbid_unknown_fields=True, kw_only=True):
    """The choice of tools that may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingParam(Struct, forbid_unknown_fields=True, kw_only=True):
    """Whether the model reasons first, if its chat template can choose."""

    type: Literal["enabled", "adaptive", "disabled"]
    # Accepted and without effect: only max_tokens bounds an answer.
    budget_tokens: int | None = None


class CountRequest(RequestBody, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    api: ClassVar[str] = "messages"

    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: str | Annotated[list[JsonObject], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[ToolParam], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None


class MessagesRequest(CountRequest, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: Annotated[list[Stop], Meta(max_length=16)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None


class TokenCount(Struct):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageUsage(Struct, kw_only=True):
    """Tokens of an answer; prompt tokens that came from the prefix cache are counted separately."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class Ending(Struct):
    """Why an answer ended."""

    stop_reason: str
    stop_sequence: str | None = None


class Message(Struct, kw_only=True):
    """Answer of POST /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessagesError(Struct, kw_only=True):
    """An error: its kind, and a sentence."""

    type: str
    message: str


class MessagesErrorBody(Struct, kw_only=True):
    """The body of every answer of these routes that reports a failure."""

    type: Literal["error"] = "error"
    error: MessagesError


def error_body(error: ApiError) -> bytes:
    """Return an error as a body."""
    kind = _TYPES.get(error.status, "invalid_request_error")
    return msgspec.json.encode(
        MessagesErrorBody(error=MessagesError(type=kind, message=error.detail.message))
    )


def error_event(error: ApiError) -> bytes:
    """Return an error as an event; Anthropic's client raises on it."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"
