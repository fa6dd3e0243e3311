"""Requests and answers of /v1/responses."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from octavo.server.api.structs import (
    MAX_MESSAGES,
    MAX_TOOLS,
    FunctionName,
    FunctionTool,
    JsonObject,
    Priority,
    Reasoning,
    RequestBody,
    RequestId,
    Salt,
)


class TextFormat(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The required form of the answer. All schemas are strict."""

    type: Literal["text", "json_object", "json_schema"]
    schema: JsonObject | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """How the answer is written; None: as text."""

    format: TextFormat | None = None


class ResponseTool(FunctionTool, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="function"):
    """A function that may be called."""


class TextInput(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What a custom tool's text must be; a grammar has its last two fields."""

    type: Literal["text", "grammar"]
    definition: str | None = None
    syntax: Literal["lark", "regex"] | None = None


class CustomResponseTool(Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="custom"):
    """A tool that takes a text instead of arguments."""

    name: FunctionName
    description: str | None = None
    format: TextInput | None = None


class Namespace(Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="namespace"):
    """Tools that have a name in common."""

    name: FunctionName
    tools: Annotated[list[ResponseTool | CustomResponseTool], Meta(max_length=MAX_TOOLS)]
    description: str | None = None


AnyTool = ResponseTool | CustomResponseTool | Namespace


class ResponseToolChoice(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The tool that must be called, or of type allowed_tools those that may be, or of which one must."""

    type: Literal["function", "custom", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[JsonObject] | None = None


class ResponsesRequest(RequestBody, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/responses, without what needs a memory: nothing is stored."""

    api: ClassVar[str] = "responses"

    input: str | Annotated[list[JsonObject], Meta(max_length=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[AnyTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    stream: bool | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None
    metadata: dict[str, str] | None = None


class OutputText(Struct, kw_only=True):
    """The text of a message."""

    text: str
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    """An answer's message."""

    id: str
    status: str
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningText(Struct, kw_only=True):
    """The text of reasoning."""

    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class ReasoningItem(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The reasoning before an answer."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: list[Any] = []
    encrypted_content: str | UnsetType = UNSET


class FunctionCallItem(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomCallItem(Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    status: str
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomCallItem


class InputDetails(Struct):
    """How much of the input came from the prefix cache."""

    cached_tokens: int


class OutputDetails(Struct):
    """How much of the output is reasoning; always 0, as it is not counted separately."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct, kw_only=True):
    """Tokens of an answer."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(Struct):
    """Why an answer failed."""

    code: str
    message: str


class Reason(Struct):
    """Why an answer is incomplete."""

    reason: str


class ResponseObject(Struct, kw_only=True):
    """Answer of POST /v1/responses."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[OutputItem]
    object: Literal["response"] = "response"
    error: ResponseFailure | None = None
    incomplete_details: Reason | None = None
    instructions: str | None = None
    metadata: dict[str, str] = {}
    max_output_tokens: int | None = None
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    conversation: JsonObject | None = None
    store: bool = False
    reasoning: Reasoning | None = None
    text: TextOptions
    temperature: float | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice = "auto"
    tools: list[AnyTool] = []
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None


class ResponseEvent(Struct, kw_only=True):
    """One event of a streamed answer; which fields it has depends on its type."""

    type: str
    sequence_number: int = 0
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
