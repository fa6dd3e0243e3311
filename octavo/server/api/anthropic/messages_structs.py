"""Requests, answers and errors of /v1/messages. Imports nothing of the engine."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

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
OVERLOADED = 529
"""Anthropic's status for a server that takes no requests now."""
# Anthropic's client acts on this code: it sends the whole conversation again.
NO_THREAD = "thread_not_found"


class Block(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """A part of a message."""


class TextBlock(Block, tag="text"):
    """A text, of either side."""

    text: str


class ThinkingBlock(Block, tag="thinking"):
    """Reasoning, with a signature (signature.py), which carries it if the client wants no text."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(Block, tag="tool_use"):
    """A call of a tool; one that a server ran has that server's name, too."""

    id: str
    name: str
    input: JsonObject
    server_name: str | None = None


class ToolResultBlock(Block, tag="tool_result"):
    """The result of a call."""

    tool_use_id: str
    content: str | list[JsonObject] = ""
    is_error: bool = False


class ToolReferenceBlock(Block, tag="tool_reference"):
    """A tool that a search has found."""

    tool_name: str


class DocumentBlock(Block, tag="document"):
    """A document, of which plain text is read."""

    source: JsonObject
    title: str | None = None
    context: str | None = None


class SearchResultBlock(Block, tag="search_result"):
    """A text that the client found, and where."""

    source: str
    title: str
    content: list[JsonObject]


AnyBlock = (
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | ToolReferenceBlock | DocumentBlock
    | SearchResultBlock
)  # fmt: skip
Effort = Literal["low", "medium", "high", "xhigh", "max"]


def part(found: Mapping[str, object], kind: Any, where: str) -> Any:
    """Return a block or a tool of a kind; an error of it names its place in the body.

    Raises:
        ApiError: a field is missing, unknown or of a wrong type.
    """
    # Clients send back what they received, with null for missing fields.
    try:
        return msgspec.convert({name: value for name, value in found.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"{where}: {error}", param=where) from error


class JsonFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    """The schema of the answer. All schemas are strict."""

    type: Literal["json_schema"]
    schema: JsonObject


class TurnConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    """How hard the model is to reason."""

    effort: Effort | None = None


class OutputConfig(TurnConfig, forbid_unknown_fields=True, kw_only=True):
    """How hard the model is to reason, and the form of its answer."""

    format: JsonFormat | None = None


class MessageParam(Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn of a conversation; a later message of the user's may clear the system's."""

    role: Literal["user", "assistant", "system"]
    # Blocks are read one by one (`part`). The assistant may have said nothing.
    content: str | Annotated[list[JsonObject], Meta(max_length=MAX_MESSAGES)]
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: TurnConfig | None = None


class ToolParam(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that may be called. One of a type of Anthropic's has no schema (messages_tools.py)."""

    name: FunctionName
    input_schema: JsonObject | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    input_examples: Annotated[list[JsonObject], Meta(max_length=MAX_TOOLS)] | None = None
    defer_loading: bool | None = None


class ToolChoiceParam(Struct, forbid_unknown_fields=True, kw_only=True):
    """The choice of tools that may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingParam(Struct, forbid_unknown_fields=True, kw_only=True):
    """Whether the model reasons first, if its chat template can choose, and whether that is shown."""

    type: Literal["enabled", "adaptive", "disabled"]
    display: Literal["summarized", "omitted"] | None = None


class ThreadParam(Struct, forbid_unknown_fields=True, kw_only=True):
    """Asks the server to keep the conversation, or to go on with one that it has kept."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class MessageFields(RequestBody, forbid_unknown_fields=True, kw_only=True):
    """What both routes take."""

    api: ClassVar[str] = "messages"

    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: str | Annotated[list[JsonObject], Meta(max_length=MAX_MESSAGES)] | None = None
    # Read one by one, as blocks are.
    tools: Annotated[list[JsonObject], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    # An older name of output_config.format.
    output_format: JsonFormat | None = None
    thread: ThreadParam | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=16)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None


class CountRequest(MessageFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    max_tokens: int | None = None


class MessagesRequest(MessageFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: int


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


class MessagesError(Struct, kw_only=True, omit_defaults=True):
    """An error: its kind, a sentence, and a code that clients act on."""

    type: str
    message: str
    details: dict[str, str] | None = None


class MessagesErrorBody(Struct, kw_only=True):
    """The body of every answer of these routes that reports a failure."""

    type: Literal["error"] = "error"
    error: MessagesError


def error_body(error: ApiError) -> bytes:
    """Return an error as a body."""
    kind = _TYPES.get(error.status, "invalid_request_error")
    detail = error.detail
    details = {"error_code": NO_THREAD} if detail.code == NO_THREAD else None
    return msgspec.json.encode(
        MessagesErrorBody(error=MessagesError(type=kind, message=detail.message, details=details))
    )


def anthropic_status(error: ApiError) -> int:
    """Return an error's status by Anthropic's list."""
    return OVERLOADED if error.status == 503 else error.status


def error_event(error: ApiError) -> bytes:
    """Return an error as an event; Anthropic's client raises on it."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"
