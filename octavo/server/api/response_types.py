"""Requests and answers of /v1/responses."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from octavo.server.api.types import MAX_MESSAGES, JsonObject, Priority, RequestId, Salt


class TextFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    """The form of the answer: plain text."""

    type: Literal["text"] = "text"


class TextOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """How the answer is written."""

    format: TextFormat | None = None


class ResponsesRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/responses, without what needs a memory: nothing is stored, nothing is called."""

    input: str | Annotated[list[JsonObject], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None
    # Accepted and without effect.
    store: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None


class OutputText(Struct, kw_only=True):
    """The text of a message."""

    text: str
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(Struct, kw_only=True):
    """An answer's message."""

    id: str
    status: str
    content: list[OutputText]
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class InputDetails(Struct):
    """How much of the input came from the prefix cache."""

    cached_tokens: int


class OutputDetails(Struct):
    """How much of the output is reasoning; it is not told apart."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct, kw_only=True):
    """Tokens of an answer."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Reason(Struct):
    """Why an answer is incomplete."""

    reason: str


class ResponseObject(Struct, kw_only=True):
    """Answer of POST /v1/responses."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[OutputMessage]
    object: Literal["response"] = "response"
    error: None = None
    incomplete_details: Reason | None = None
    instructions: str | None = None
    metadata: dict[str, str] = {}
    max_output_tokens: int | None = None
    parallel_tool_calls: bool = False
    previous_response_id: None = None
    store: bool = False
    temperature: float | None = None
    tool_choice: str = "none"
    tools: list[Any] = []
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None


class ResponseEvent(Struct, kw_only=True):
    """One event of a streamed answer; which fields it has depends on its type."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputMessage | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
