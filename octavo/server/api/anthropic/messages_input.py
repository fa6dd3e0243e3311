"""Converts a request of /v1/messages to a chat."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from octavo.server.api.anthropic.messages_structs import (
    AnyBlock,
    CountRequest,
    MessageParam,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolChoiceParam,
    ToolParam,
    ToolResultBlock,
    ToolUseBlock,
)
from octavo.server.api.body import decode
from octavo.server.api.prompt_tokens import Reading
from octavo.server.api.sampling import Defaults, chat_params
from octavo.server.api.structs import (
    ChatRequest,
    FunctionChoice,
    FunctionTool,
    JsonObject,
    NamedTool,
    Tool,
    ToolChoice,
)
from octavo.server.api.toolbox import rendered, toolbox_of
from octavo.server.api_errors import ApiError, refused
from octavo.server.reading.requests import Answered, ChatInput, Materials, check_model

# Octavo never fills these lists of a block.
_MAY_BE_EMPTY = {"citations"}
_KINDS = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "tool_result": ("text",),
}


def parse_messages(body: bytes, defaults: Defaults) -> ChatInput:
    """Decode a body of /v1/messages.

    Raises:
        ApiError, SamplingParamsError: it is malformed, or a value is out of range.
    """
    fields, left_out = decode(body, MessagesRequest)
    chat = chat_of(fields)
    return ChatInput(fields, chat, chat_params(chat, defaults), left_out)


def counted(materials: Materials, body: bytes) -> Answered:
    """Answer a body of /v1/messages/count_tokens.

    Raises:
        ApiError, ChatTemplateError, PromptError: it is malformed.
    """
    fields, left_out = decode(body, CountRequest)
    check_model(fields.model, materials.model)
    chat, prompts = chat_of(fields), materials.prompts
    shown = rendered(prompts, chat, toolbox_of(chat, materials.formats, None))
    count = len(prompts.encode_chat(shown, Reading()))
    return msgspec.json.encode(TokenCount(count)), left_out


def chat_of(fields: CountRequest) -> ChatRequest:
    """Return a request as a chat. A last message of the assistant is continued.

    Raises:
        ApiError: a block is of a kind that is not supported there, or fields contradict each other.
    """
    messages: list[JsonObject] = []
    if fields.system not in (None, []):
        messages.append({"role": "system", "content": _text(fields.system, "system", "system")})
    for index, message in enumerate(fields.messages):
        messages += _turns(message, f"messages[{index}]")
    choice, thinking = fields.tool_choice, fields.thinking
    chat = ChatRequest(
        messages=messages,
        continue_final_message=messages[-1]["role"] == "assistant",
        tools=[_tool(tool) for tool in fields.tools or ()],
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        chat_template_kwargs=None if thinking is None else {"enable_thinking": thinking.type != "disabled"},
    )
    if isinstance(fields, MessagesRequest):
        chat.max_tokens, chat.stop = fields.max_tokens, fields.stop_sequences
        chat.temperature, chat.top_p, chat.top_k = fields.temperature, fields.top_p, fields.top_k
    return chat


def _tool(tool: ToolParam) -> Tool:
    function = FunctionTool(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _choice(choice: ToolChoiceParam) -> ToolChoice:
    if (choice.name is None) == (choice.type == "tool"):
        raise refused("tool_choice", "has a name if its type is tool, and only then")
    if choice.name is not None:
        return NamedTool(type="function", function=FunctionChoice(name=choice.name))
    return "none" if choice.type == "none" else "required" if choice.type == "any" else "auto"


def _turns(message: MessageParam, where: str) -> Iterator[JsonObject]:
    """Yield the chat messages that one message becomes: each tool's result is a message of its own."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    blocks = _blocks(message.content, f"{where}.content", message.role)
    if message.role == "assistant":
        yield _assistant(blocks)
        return
    if not blocks:
        raise ApiError(400, f"{where}.content: expected a block or more, got none", param=f"{where}.content")
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            text = _text(block.content, f"{where}.content[{index}].content", "tool_result")
            content = f"Error: {text}" if block.is_error else text
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    if texts:
        yield {"role": "user", "content": "\n".join(texts)}


def _assistant(blocks: Sequence[AnyBlock]) -> JsonObject:
    text = "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: str | Sequence[JsonObject], where: str, place: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in _blocks(content, where, place) if isinstance(block, TextBlock))


def _blocks(content: Sequence[JsonObject], where: str, place: str) -> list[AnyBlock]:
    return [_block(block, f"{where}[{index}]", _KINDS[place]) for index, block in enumerate(content)]


def _block(block: JsonObject, where: str, kinds: Sequence[str]) -> AnyBlock:
    # Clients send back what they received, with null or an empty list for missing fields.
    kept = {name: value for name, value in block.items() if value is not None}
    for name in _MAY_BE_EMPTY & kept.keys():
        if not kept[name]:
            del kept[name]
    if kept.get("type") == "thinking":
        kept.setdefault("signature", "")
    if kept.get("type") not in kinds:
        text = f"{where}: expected a block of type {' or '.join(kinds)}, got {kept.get('type')!r}"
        raise ApiError(400, text[:400], param=where)
    try:
        return msgspec.convert(kept, AnyBlock)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"{where}: {error}", param=where) from error
