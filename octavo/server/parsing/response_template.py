"""Reads a checkpoint's response_template: how its answers are divided, as transformers 5 defines it.

The part that is read: literal markers, `\\s*` before one, text for reasoning and content, and calls of
{"name": ..., "arguments": ...}. Whatever else a template asks for is refused by name.
"""

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from octavo.errors import UnsupportedModelError

_Markers = tuple[str, str]
_TEMPLATE_KEYS = frozenset({"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"})
_REASONING = ("reasoning_content", "reasoning", "thinking")
_FIELD_KEYS = frozenset({"open", "open_pattern", "close", "close_pattern", "content", "repeats", "optional"})
_TRANSFORMS = (
    {"type": "function", "function": "{content}"},
    {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}},
)
# A backslash makes any character literal that is neither a letter nor a digit.
_PLAIN = re.compile(r"(?:[^\\.^$*+?{}\[\]|()]|\\[^A-Za-z0-9])+")


def read_response_template(spec: Mapping[str, Any]) -> tuple[_Markers | None, _Markers | None]:
    """Return the markers of tool calls and of reasoning; None: the template has no such field.

    Raises:
        UnsupportedModelError: the template asks for what is not supported; the message names it.
    """
    _check_keys("", spec, _TEMPLATE_KEYS)
    if spec.get("version", 1) != 1:
        _refuse("version", spec["version"])
    fields = spec.get("fields")
    if not isinstance(fields, Mapping):
        _refuse("fields", fields)
    calls = reasoning = None
    for name, field in fields.items():
        if not isinstance(field, Mapping):
            _refuse(name, field)
        if name == "tool_calls":
            calls = _calls(field)
        elif name in _REASONING:
            reasoning = _markers(name, field, "text")
        elif name == "content":
            _check_keys(name, field, _FIELD_KEYS - {"open", "open_pattern"})
        else:
            _refuse("fields", name)
    return calls, reasoning


def _calls(field: Mapping[str, Any]) -> _Markers:
    if field.get("transform") not in _TRANSFORMS:
        _refuse("tool_calls.transform", field.get("transform"))
    if not field.get("repeats", False):
        _refuse("tool_calls.repeats", field.get("repeats"))
    return _markers("tool_calls", {key: value for key, value in field.items() if key != "transform"}, "json")


def _markers(name: str, field: Mapping[str, Any], content: str) -> _Markers:
    _check_keys(name, field, _FIELD_KEYS)
    if field.get("content", "text") != content:
        _refuse(f"{name}.content", field.get("content"))
    return _marker(name, field, "open"), _marker(name, field, "close")


def _marker(name: str, field: Mapping[str, Any], key: str) -> str:
    """Return a marker, given as text or as a pattern that matches one text."""
    text, pattern = field.get(key), field.get(f"{key}_pattern")
    if isinstance(text, list) and len(text) == 1:
        text = text[0]
    if isinstance(text, str) and text.strip() and pattern is None:
        return text.strip()
    if isinstance(pattern, str) and text is None:
        plain = pattern.removeprefix(r"\s*").removesuffix(r"\s*")
        if _PLAIN.fullmatch(plain):
            return re.sub(r"\\(.)", r"\1", plain)
        _refuse(f"{name}.{key}_pattern", pattern)
    _refuse(f"{name}.{key}", text)


def _check_keys(where: str, found: Mapping[str, Any], known: frozenset[str]) -> None:
    for key in found:
        if key not in known:
            _refuse(f"{where}.{key}".lstrip("."), found[key])


def _refuse(what: str, got: object) -> NoReturn:
    text = repr(got)
    raise UnsupportedModelError(f"the model's response_template is not supported: {what} is {text[:200]}")
