"""Converts the input of /v1/responses to a chat."""

from typing import Any

from msgspec import ValidationError, convert, structs

from octavo.sampling_params import SamplingParams, StructuredOutput
from octavo.server.api.anthropic.signature import carried
from octavo.server.api.body import decode
from octavo.server.api.responses.response_store import OPTION
from octavo.server.api.responses.response_structs import AnyTool, ResponsesRequest, TextFormat
from octavo.server.api.responses.response_tools import Names, chat_choice, chat_tools, known_name, names_of
from octavo.server.api.sampling import Defaults
from octavo.server.api.structs import MAX_TOOLS, ChatRequest
from octavo.server.api_errors import ApiError, refused, refused_part
from octavo.server.reading.requests import ChatInput

_TOOLS = "additional_tools"
_SEALED = "reasoning.encrypted_content"
_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_COMMON = frozenset({"type", "id", "status"})
_CALL = _COMMON | {"call_id", "name", "namespace"}
_KNOWN = {
    "message": _COMMON | {"role", "content"},
    # OpenAI's client adds what it has parsed.
    "function_call": _CALL | {"arguments", "parsed_arguments"},
    "custom_tool_call": _CALL | {"input"},
    "function_call_output": _CALL | {"output"},
    "custom_tool_call_output": _CALL | {"output"},
    "reasoning": _COMMON | {"content", "summary", "encrypted_content"},
}


def parse_response(body: bytes, defaults: Defaults) -> ChatInput:
    """Decode a body of /v1/responses.

    Raises:
        ApiError, SamplingParamsError: it is malformed, or a value is out of range.
    """
    fields, left_out = decode(body, ResponsesRequest)
    if fields.top_logprobs:
        raise refused("top_logprobs", "is not supported here; use /v1/chat/completions")
    most = fields.max_output_tokens
    if most is not None and not 1 <= most < 2**31:
        raise refused("max_output_tokens", f"must be an integer in [1, {2**31 - 1}], got {most}")
    options: dict[str, Any] = {**defaults, "max_tokens": fields.max_output_tokens}
    for name in ("temperature", "top_p"):
        if getattr(fields, name) is not None:
            options[name] = getattr(fields, name)
    params = SamplingParams(**options, structured=_structured(format_of(fields)))
    if fields.include and set(fields.include) != {_SEALED}:
        raise refused("include", f"may hold {_SEALED}, got {str(fields.include)[:200]}")
    fields = _with_all_tools(fields)
    return ChatInput(fields, chat_of(fields), params, left_out)


def _with_all_tools(fields: ResponsesRequest) -> ResponsesRequest:
    """Return a request whose tools are those of its items, too."""
    if isinstance(fields.input, str) or not any(item.get("type") == _TOOLS for item in fields.input):
        return fields
    tools, items = [*(fields.tools or ())], []
    for index, item in enumerate(fields.input):
        if item.get("type") == _TOOLS:
            tools += _tools(item.get("tools"), f"input[{index}].tools")
        else:
            items.append(item)
    if len(tools) > MAX_TOOLS:
        raise refused("tools", f"must be at most {MAX_TOOLS}, got {len(tools)}")
    return structs.replace(fields, tools=tools, input=items)


def _tools(tools: object, where: str) -> list[AnyTool]:
    try:
        return convert(tools, list[AnyTool])
    except ValidationError as error:
        raise ApiError(400, f"{where}: {error}", param=where) from error


def format_of(fields: ResponsesRequest) -> TextFormat:
    """Return what the answer must be."""
    found = None if fields.text is None else fields.text.format
    return TextFormat(type="text") if found is None else found


def _structured(fields: TextFormat) -> StructuredOutput | None:
    if fields.type == "json_schema":
        if fields.schema is None:
            raise refused("text", "needs a schema in its format, of type json_schema")
        return StructuredOutput(json_schema=fields.schema)
    return StructuredOutput(json_object=True) if fields.type == "json_object" else None


def chat_of(fields: ResponsesRequest) -> ChatRequest:
    """Return a request as a chat: its messages and its tools.

    Raises:
        ApiError: an item is of a kind that is not supported.
    """
    messages: list[dict[str, Any]] = []
    names = names_of(fields.tools or ())
    if fields.instructions is not None:
        messages.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        messages.append({"role": "user", "content": fields.input})
    else:
        for index, item in enumerate(fields.input):
            _add(messages, item, f"input[{index}]", names)
    return ChatRequest(
        # A client that only asks whether somebody is there may send no items.
        messages=messages or [{"role": "user", "content": ""}],
        tools=chat_tools(fields.tools or ()),
        tool_choice=chat_choice(fields),
        parallel_tool_calls=fields.parallel_tool_calls,
        reasoning=fields.reasoning,
        cache_salt=fields.cache_salt,
        priority=fields.priority,
    )


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str, names: Names) -> None:
    """Add an item. Reasoning, text and calls of one turn become one message of the assistant."""
    item = {name: value for name, value in item.items() if value is not None}
    kind = _checked_kind(item, where)
    if kind.endswith("_output"):
        output = _content(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind in ("function_call", "custom_tool_call"):
        calls = _turn(messages, calls=True).setdefault("tool_calls", [])
        calls.append(_call(item, where, names, is_custom=kind == "custom_tool_call"))
    elif kind == "reasoning":
        _think(messages, item, where)
    elif item.get("role") == "assistant":
        _say(messages, _content(item.get("content", ""), f"{where}.content"))
    else:
        messages.append(
            {"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")}
        )


def _checked_kind(item: dict[str, Any], where: str) -> str:
    """Return an item's type; its fields are known then, and those that are always texts are texts."""
    kind = item.get("type", "message")
    if kind == "item_reference":
        name = str(item.get("id"))[:200]
        text = f"{where}: no item is kept here by the id {name!r}; send the item itself ({OPTION})"
        raise ApiError(400, text, param=where, code="item_not_found")
    if not isinstance(kind, str) or kind not in _KNOWN:
        text = f"{where}.type: expected one of {', '.join(_KNOWN)}, got {kind!r}"
        raise ApiError(400, text[:400], param=f"{where}.type")
    for name in ("role", "call_id", "name", "namespace", "arguments", "input", "encrypted_content"):
        if not isinstance(item.get(name, ""), str):
            text = f"{where}.{name}: expected a string, got {type(item[name]).__name__}"
            raise ApiError(400, text, param=f"{where}.{name}")
    if kind == "message" and "role" not in item:
        raise ApiError(400, f"{where}.role: expected a string, got none", param=f"{where}.role")
    unknown = sorted(name for name in item if name not in _KNOWN[kind])
    if unknown:
        raise ApiError(400, f"{where}: unknown field {unknown[0]!r}", param=where, code="unknown_field")
    return kind


def _call(item: dict[str, Any], where: str, names: Names, *, is_custom: bool) -> dict[str, Any]:
    if "name" not in item:
        raise ApiError(400, f"{where}.name: expected a string, got none", param=f"{where}.name")
    # Clients may leave out the namespace; the model must read the name that it wrote.
    name = known_name(item["name"], item.get("namespace"), names)
    if is_custom:
        called = {"custom": {"name": name, "input": item.get("input", "")}, "type": "custom"}
    else:
        called = {"function": {"name": name, "arguments": item.get("arguments")}, "type": "function"}
    return {"id": item.get("call_id"), **called}


def _think(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Add reasoning: its text, or what its encrypted_content carries, if that is this server's."""
    parts = _parts(item.get("content", []), f"{where}.content")
    text = "\n".join(part["text"] for part in parts) or carried(item.get("encrypted_content", ""))
    if text:
        turn = _turn(messages)
        turn["reasoning_content"] = "\n".join([*filter(None, [turn.get("reasoning_content")]), text])


def _turn(messages: list[dict[str, Any]], *, calls: bool = False) -> dict[str, Any]:
    """Return the assistant's unfinished message, or a new one. Calls come last in it."""
    last = messages[-1] if messages else {"role": None}
    is_under_way = last["role"] == "assistant" and (calls or last.keys() <= {"role", "reasoning_content"})
    if not is_under_way:
        messages.append({"role": "assistant"})
    return messages[-1]


def _say(messages: list[dict[str, Any]], content: Any) -> None:
    """Add text to the assistant's turn; after a call it goes on with the text before that."""
    last = messages[-1] if messages else {}
    if "tool_calls" in last and isinstance(content, str | list):
        last["content"] = _text(last.get("content")) + _text(content)
    else:
        _turn(messages)["content"] = content


def _text(content: Any) -> str:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _content(content: Any, where: str) -> Any:
    if not isinstance(content, str | list):
        text = f"{where}: expected a text or a list of parts, got {type(content).__name__}"
        raise ApiError(400, text, param=where)
    return _parts(content, where) if isinstance(content, list) else content


def _parts(parts: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(parts, list):
        raise ApiError(400, f"{where}: expected a list of parts, got {type(parts).__name__}", param=where)
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(parts)]


def _part(part: object, where: str) -> dict[str, Any]:
    if isinstance(part, dict) and part.get("type") == "refusal":
        part = {"type": "text", "text": part.get("refusal")}
    if not isinstance(part, dict) or part.get("type") not in _PARTS:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise refused_part(where, kind, f"only text is supported, got {kind!r}")
    if not isinstance(part.get("text"), str):
        raise ApiError(400, f"{where}.text: expected a string", param=where)
    return {"type": "text", "text": part["text"]}
