"""Checks chat messages and converts them to the form that chat templates expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.errors import ChatTemplateError, refuse_unknown

MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")
MAX_DEPTH = 32
# Asked first, because a value may hold hundreds of thousands of them.
_PLAIN = frozenset({str, int, float, bool, type(None)})


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Check the messages of a conversation and copy them into the form that templates expect.

    Text parts are joined with newlines. Arguments of tool calls, which are JSON text in OpenAI's API, are
    parsed; no text means no arguments.

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
    refuse_unknown(ChatTemplateError, f"{where}: unknown key", message, MESSAGE_KEYS)
    for key in ("role", "name", "tool_call_id", "reasoning_content", "thinking"):
        if (key == "role" or key in message) and not isinstance(message.get(key), str):
            raise ChatTemplateError(f"{where}.{key}: expected a string, got {_kind(message.get(key))}")
    checked = dict(message)
    if "tool_calls" in message:
        where_calls = f"{where}.tool_calls"
        calls = _checked_objects(message["tool_calls"], where_calls)
        checked["tool_calls"] = [
            _with_parsed_arguments(call, f"{where_calls}[{index}]") for index, call in enumerate(calls)
        ]
    checked["content"] = _checked_content(message, where)
    return checked


def _checked_content(message: Mapping[str, object], where: str) -> str | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return None
    if not isinstance(content, list):
        raise ChatTemplateError(
            f"{where}.content: expected a string or a list of text parts, got {_kind(content)}"
        )
    return "\n".join(_checked_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _checked_part(part: object, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        got = part.get("type") if isinstance(part, Mapping) else _kind(part)
        raise ChatTemplateError(f"{where}: expected a part of type 'text', got {got!r}")
    given = [key for key, value in part.items() if value is not None]
    refuse_unknown(ChatTemplateError, f"{where}: unknown key", given, ("type", "text"))
    text = part.get("text")
    if not isinstance(text, str):
        raise ChatTemplateError(f"{where}.text: expected a string, got {_kind(text)}")
    return text


def _checked_objects(objects: object, where: str) -> list[Any]:
    if not isinstance(objects, list) or not all(isinstance(entry, dict) for entry in objects):
        raise ChatTemplateError(f"{where}: expected a list of JSON objects, got {_kind(objects)}")
    check_json(objects, where)
    return objects


def _with_parsed_arguments(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise ChatTemplateError(f"{where}.function: expected an object, got {_kind(function)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError) as error:
            raise ChatTemplateError(f"{where}.function.arguments: expected JSON: {error}") from error
        check_json(arguments, f"{where}.function.arguments")
    return call | {"function": function | {"arguments": arguments}}


def _kind(value: object) -> str:
    return "an empty list" if value == [] else type(value).__name__
