"""Requests and answers as typed structs; the OpenAPI document follows from them."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

MAX_TOOLS = 128
FunctionName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:/-]+$(?!\n)")]
MAX_PROMPTS = 256
MAX_MESSAGES = 4096
MAX_STOP_CHARS = 256

Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Salt = Annotated[str, Meta(min_length=1, max_length=1024)]
RequestId = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$(?!\n)")]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
JsonObject = dict[str, Any]


class RequestBody(Struct):
    """A body. `api` is the name by which the tables of what may be left out know it (left_out.py)."""

    api: ClassVar[str] = ""


class FunctionTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that may be called. Without parameters it takes none.

    Attributes:
        defer_loading: the model is not shown it among the tools: a message describes it.
    """

    name: FunctionName
    description: str | UnsetType | None = UNSET
    parameters: dict[str, Any] | UnsetType | None = UNSET
    strict: bool | None = None
    defer_loading: bool | None = None


class CustomGrammar(Struct, forbid_unknown_fields=True, kw_only=True):
    """A grammar of a custom tool's text."""

    definition: str
    syntax: Literal["lark", "regex"]


class CustomFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a custom tool's text must be."""

    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None


class CustomTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that takes a text instead of arguments."""

    name: FunctionName
    description: str | None = None
    format: CustomFormat | None = None


class Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool by OpenAI's form; it has the field that its type names."""

    type: Literal["function", "custom"]
    function: FunctionTool | UnsetType = UNSET
    custom: CustomTool | UnsetType = UNSET


class FunctionChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    """A function's name."""

    name: str


class AllowedTools(Struct, forbid_unknown_fields=True, kw_only=True):
    """The tools that may be called, of all that are shown, or of which one must be called."""

    mode: Literal["auto", "required"]
    tools: list[JsonObject]


class NamedTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """The tool that must be called, or those that may; it has the field that its type names."""

    type: Literal["function", "custom", "allowed_tools"]
    function: FunctionChoice | UnsetType = UNSET
    custom: FunctionChoice | UnsetType = UNSET
    allowed_tools: AllowedTools | UnsetType = UNSET


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledCustom(Struct, kw_only=True):
    """A call of a custom tool: its name and its text. In a stream, what is new in it."""

    input: str
    name: str | UnsetType = UNSET


class CalledFunction(Struct, kw_only=True):
    """A call: a function's name and its arguments, a JSON object as text. In a stream, what is new in it."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(Struct, kw_only=True):
    """A call in a whole answer."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET


class ToolCallDelta(Struct, kw_only=True):
    """The new part of a call; the first delta has its id and its name."""

    index: int
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """Parts of a stream beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Struct, forbid_unknown_fields=True, kw_only=True):
    """A schema by OpenAI's form. All schemas are strict."""

    schema: JsonObject | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    """The required form of the answer, as OpenAI writes it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True, kw_only=True):
    """The required form of the answer, as vLLM writes it; exactly one field is set."""

    json: JsonObject | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None


class SamplingFields(RequestBody, forbid_unknown_fields=True, kw_only=True):
    """Fields common to requests for completions and for chats. None is the default everywhere."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[dict[TokenId, float], Meta(max_length=1024)] | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Meta(ge=1, le=4096)] | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None


class Reasoning(Struct, forbid_unknown_fields=True, kw_only=True):
    """How much to reason, as OpenAI's Responses and OpenRouter write it."""

    effort: str | None = None


class Thinking(Struct, forbid_unknown_fields=True, kw_only=True):
    """Whether to reason, as clients of DeepSeek, GLM and Kimi write it."""

    type: Literal["enabled", "adaptive", "auto", "disabled"]


class CompletionRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/completions. A prompt is a text or token ids, alone or in a list."""

    api: ClassVar[str] = "completions"

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None


class ChatRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    api: ClassVar[str] = "chat"

    messages: Annotated[list[JsonObject], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    enable_thinking: bool | None = None
    thinking: Thinking | bool | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


def wish_of(fields: ChatRequest) -> tuple[str | None, bool | None]:
    """Return how hard the model is to reason, and whether at all; None: as it likes."""
    effort, thinks, thinking = fields.reasoning_effort, fields.enable_thinking, fields.thinking
    if effort is None and fields.reasoning is not None:
        effort = fields.reasoning.effort
    if thinks is None and thinking is not None:
        thinks = thinking if isinstance(thinking, bool) else thinking.type != "disabled"
    return effort, thinks


class PromptTokensDetails(Struct):
    """How many tokens of a prompt came from the prefix cache."""

    cached_tokens: int


class Usage(Struct, kw_only=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class TopLogprob(Struct):
    """A token that could have come here."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    """A token and its log-probability, with the most likely ones at its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of an answer's tokens."""

    content: list[TokenLogprob]


class CompletionLogprobs(Struct):
    """Log-probabilities of a text's tokens, and where they begin in it. The first of a prompt has none."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Struct):
    """A token of a prompt under the model."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class AnswerMessage(Struct, kw_only=True):
    """The message of one answer: content, reasoning and calls."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """One of n answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(Struct, kw_only=True):
    """The new part of an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(Struct, kw_only=True):
    """The new part of one of n answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct, kw_only=True):
    """One text, or what is new in it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """Answer of POST /v1/completions, and each event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
