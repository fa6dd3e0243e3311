"""Checks chat messages and converts them to the form that chat templates expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.errors import ChatTemplateError, TextOnlyError, refuse_unknown

MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")
MAX_DEPTH = 32
# Fields that clients' own types add to answers they send back, and fields that are empty there.
_ADDED = frozenset({"index", "parsed", "parsed_arguments"})
_REFUSED = {"audio": "models read text only", "function_call": "it is an old name; give tool_calls"}
_EMPTY = ("annotations", "tool_calls")
_MEDIA = ("image", "audio", "video", "file")
# These are tested first, because a value may hold hundreds of thousands of them.
_PLAIN = frozenset({str, int, float, bool, type(None)})


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Check the messages of a conversation and copy them into the form that templates expect.

    Text parts are joined with newlines. Arguments of tool calls, which are JSON text in OpenAI's API, are
    parsed; no text and null mean no arguments. A call of the assistant's whose arguments break off is left
    out if there is content, which holds its text: a stream that has begun to send a call cannot take it
    back. Fields that are null say nothing, and a turn of the assistant's may have no content.

    Args:
        messages: a non-empty list of messages with a role and a content.

    Raises:
        ChatTemplateError: a message is not of the expected shape; the error names its index.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise ChatTemplateError(f"expected a non-empty list of messages, got {_kind(messages)}")
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def checked_tools(tools: object) -> list[Any]:
    """Check that tools are a list of JSON objects.

    Raises:
        ChatTemplateError: they are not.
    """
    return _checked_objects(tools, "tools")


def is_medium(kind: object) -> bool:
    """Return whether a part of this type, as any API calls it, holds an image, a sound, a video or a file."""
    return isinstance(kind, str) and any(word in kind for word in _MEDIA)


def check_json(value: object, where: str, depth: int = 0) -> None:
    """Check that a value consists of JSON types and is at most MAX_DEPTH levels deep.

    Raises:
        ChatTemplateError: it is not.
    """
    if depth > MAX_DEPTH:
        raise ChatTemplateError(f"{where}: expected at most {MAX_DEPTH} levels of nesting, got more")
    if isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise ChatTemplateError(f"{where}: expected strings as keys, got {key!r}")
            if type(entry) not in _PLAIN:
                check_json(entry, f"{where}.{key}", depth + 1)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            if type(entry) not in _PLAIN:
                check_json(entry, f"{where}[{index}]", depth + 1)
    elif value is not None and not isinstance(value, str | int | float | bool):
        raise ChatTemplateError(f"{where}: expected a JSON value, got {_kind(value)}")


def encoded(value: object) -> bytes:
    """Return a value as JSON.

    Raises:
        ChatTemplateError: a text holds a lone surrogate, or a number has thousands of digits.
    """
    try:
        return encoded_text(json.dumps(value, ensure_ascii=False))
    except ValueError as error:
        raise _unwritable(error) from error


def encoded_text(text: str) -> bytes:
    """Return a text as UTF-8.

    Raises:
        ChatTemplateError: it holds a lone surrogate.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _unwritable(error) from error


def _unwritable(error: ValueError) -> ChatTemplateError:
    return ChatTemplateError(
        f"expected messages, variables and template of valid Unicode and short numbers: {error}"
    )


def _checked_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where}: expected an object with role and content, got {_kind(message)}")
    checked = {key: value for key, value in message.items() if value is not None and _says(key, value)}
    if "reasoning" in checked:
        checked = {"reasoning_content": checked.pop("reasoning"), **checked}
    if isinstance(refusal := checked.pop("refusal", None), str):
        # It is what the assistant said instead.
        checked.setdefault("content", refusal)
    for key in checked.keys() & _REFUSED.keys():
        raise ChatTemplateError(f"{where}.{key} is not supported: {_REFUSED[key]}")
    refuse_unknown(ChatTemplateError, f"{where}: unknown key", checked, MESSAGE_KEYS)
    for key in ("role", "name", "tool_call_id", "reasoning_content", "thinking"):
        if (key == "role" or key in checked) and not isinstance(checked.get(key), str):
            raise ChatTemplateError(f"{where}.{key}: expected a string, got {_kind(checked.get(key))}")
    checked["content"] = content = _checked_content(checked, where)
    if "tool_calls" in checked:
        may_break_off = checked["role"] == "assistant" and bool(content)
        calls = _checked_calls(checked.pop("tool_calls"), f"{where}.tool_calls", may_break_off=may_break_off)
        checked |= {"tool_calls": calls} if calls else {}
    return checked


def _says(key: str, value: object) -> bool:
    return key not in _ADDED and not (key in _EMPTY and value == [])


def _checked_content(message: Mapping[str, object], where: str) -> str | None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message["role"] == "assistant"):
        return content
    if not isinstance(content, list):
        raise ChatTemplateError(
            f"{where}.content: expected a string or a list of text parts, got {_kind(content)}"
        )
    return "\n".join(_checked_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _checked_part(part: object, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "refusal":
        part = {"type": "text", "text": part.get("refusal")}
    if not isinstance(part, Mapping) or part.get("type") != "text":
        got = part.get("type") if isinstance(part, Mapping) else _kind(part)
        error = TextOnlyError if is_medium(got) else ChatTemplateError
        raise error(f"{where}: expected a part of type 'text', got {got!r:.100}")
    keys = [key for key, value in part.items() if value is not None]
    refuse_unknown(ChatTemplateError, f"{where}: unknown key", keys, ("type", "text"))
    text = part.get("text")
    if not isinstance(text, str):
        raise ChatTemplateError(f"{where}.text: expected a string, got {_kind(text)}")
    return text


def _checked_objects(objects: object, where: str) -> list[Any]:
    if not isinstance(objects, list) or not all(isinstance(entry, dict) for entry in objects):
        raise ChatTemplateError(f"{where}: expected a list of JSON objects, got {_kind(objects)}")
    check_json(objects, where)
    return objects


def _checked_calls(calls: object, where: str, *, may_break_off: bool) -> list[dict[str, Any]]:
    checked = []
    for index, call in enumerate(_checked_objects(calls, where)):
        try:
            checked.append(_checked_call(call, f"{where}[{index}]"))
        except msgspec.DecodeError as error:
            if not may_break_off:
                place = f"{where}[{index}].function.arguments"
                raise ChatTemplateError(f"{place}: expected JSON: {error}") from error
    return checked


def _checked_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a call with its name first and its arguments, parsed, next, as models know it.

    Raises:
        ChatTemplateError: it is not of the expected shape.
        msgspec.DecodeError: its arguments are not JSON.
    """
    custom = call.get("custom")
    if call.get("type") == "custom" and isinstance(custom, dict):
        # Models know a custom tool as a function of one text.
        text = {"input": custom.get("input", "")}
        call = {
            **call,
            "type": "function",
            "function": {"name": custom.get("name"), "arguments": text},
            "custom": None,
        }
    function = call.get("function")
    if not isinstance(function, dict):
        raise ChatTemplateError(f"{where}.function: expected an object, got {_kind(function)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments.strip() else None
        except RecursionError as error:
            raise ChatTemplateError(f"{where}.function.arguments: expected JSON: {error}") from error
        check_json(arguments, f"{where}.function.arguments")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ChatTemplateError(f"{where}.function.arguments: expected a JSON object, got {_kind(arguments)}")
    name = {"name": function["name"]} if "name" in function else {}
    return _present(call) | {
        "function": {**name, "arguments": arguments, **_present(function, "name", "arguments")}
    }


def _present(fields: Mapping[str, Any], *but: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None and key not in (*but, *_ADDED)}


def _kind(value: object) -> str:
    return "an empty list" if value == [] else type(value).__name__
