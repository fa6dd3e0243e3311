"""Puts what clients change between the turns of a conversation, without a meaning, into one form.

A prefix is found in the cache only if its tokens are the same from the first one on. Every API renders its
prompts by way of `canonical`; `ServerConfig.canonical_prompts` turns it off. ADR 71 says what is left alone.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

_ENVIRONMENTS = ("env", "environment", "environment_context", "environment_details")
# Names of these keys' entries are the client's own, and models write arguments in the order of `properties`.
_MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTS_OF_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMAS = frozenset(
    {"items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"}
)
# This is the order of most schemas that models were trained with; other keys follow by name.
_FIRST_KEYS = ("title", "type", "enum", "description", "properties", "items", "required")


@dataclass(frozen=True, slots=True)
class Rule:
    """A text of the system prompt that says nothing to the model.

    Attributes:
        name: short, for documents.
        api: where it comes from.
        place: the beginning of a system turn, or its blocks such as <env>.
        pattern: finds it, in time that grows with the text alone; only its group stays.
        why: the reason to change it.
    """

    name: str
    api: str
    place: Literal["beginning", "environment"]
    pattern: re.Pattern[str]
    why: str


RULES = (
    Rule(
        "billing line",
        "messages, and chats made of them",
        "beginning",
        re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*()", re.IGNORECASE),
        "Claude Code's first line has a checksum that only billing reads",
    ),
    Rule(
        "time of day",
        "all",
        "environment",
        re.compile(
            r"((?:today.?s|current)[ _]date\W[^\n<]{0,40}?\d{4}[^\n<]{0,16}?)[T, ]+\d{1,2}:\d\d[^\n<]*",
            re.IGNORECASE,
        ),
        "the client calls it a date; the day stays, since models answer by it",
    ),
)


def canonical(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]]]:
    """Return a conversation and its tools in their one form; other turns than the system's stay as they are.

    Args:
        messages: unchecked ones, as any API has made them. A system turn that says nothing else is left out.
        tools: as chat templates get them; the keys of their schemas are put in order.
    """
    turns = (_turn(message) for message in messages)
    return [turn for turn in turns if turn is not None], [_tool(tool) for tool in tools]


def _turn(message: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if message.get("role") not in ("system", "developer"):
        return message
    content = message.get("content")
    written = _parts(content) if isinstance(content, list) else _text(content, is_first=True)
    return None if content and not written else {**message, "content": written}


def _parts(parts: list[Any]) -> list[Any]:
    """Return the parts of a content, without a first one that says nothing."""
    written: list[Any] = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else None
        changed = _text(text, is_first=not written)
        if changed or not text:
            written.append(part if changed == text else {**part, "text": changed})
    return written


def _text(text: Any, *, is_first: bool) -> Any:
    if not isinstance(text, str):
        return text
    for rule in RULES:
        if rule.place == "environment":
            text = _in_environments(text, rule)
        elif is_first:
            text = rule.pattern.sub(r"\1", text)
    return text


def _in_environments(text: str, rule: Rule) -> str:
    for name in _ENVIRONMENTS:
        # Each block is copied once, so that a text of many blocks takes time that grows with it alone.
        written, done = list[str](), 0
        begin = text.find(f"<{name}>")
        while begin >= 0 and (end := text.find(f"</{name}>", begin)) >= 0:
            written += (text[done:begin], rule.pattern.sub(r"\1", text[begin:end]))
            done = end
            begin = text.find(f"<{name}>", end)
        text = "".join(written) + text[done:]
    return text


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    if not isinstance(function.get("parameters"), Mapping):
        return dict(tool)
    return {**tool, "function": {**function, "parameters": _schema(function["parameters"])}}


def _schema(schema: Any) -> Any:
    """Return a schema with its own keys in order. The order of names and of data is the client's."""
    if not isinstance(schema, Mapping):
        return schema
    keys = [key for key in _FIRST_KEYS if key in schema]
    return {key: _member(key, schema[key]) for key in [*keys, *sorted(schema.keys() - set(keys))]}


def _member(key: str, value: Any) -> Any:
    if key in _MAPS_OF_SCHEMAS and isinstance(value, Mapping):
        return {name: _schema(entry) for name, entry in value.items()}
    if key in _LISTS_OF_SCHEMAS and isinstance(value, list):
        return [_schema(entry) for entry in value]
    return _schema(value) if key in _SCHEMAS else value
