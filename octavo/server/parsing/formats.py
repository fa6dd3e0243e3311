"""The formats in which models call tools and reason, and which of them a model uses."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from octavo.errors import UnsupportedModelError
from octavo.server.config import ReasoningParser, ToolCallParser
from octavo.server.parsing.call_formats import (
    GEMMA4,
    GLM45,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MISTRAL_LIST,
    QWEN3_CODER,
    CallFormat,
    Markers,
    hermes,
)
from octavo.server.parsing.harmony import CHANNEL, MESSAGE, Harmony, harmony_of
from octavo.tokenizer import Tokenizer

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
logger = logging.getLogger("octavo.server")

_THINK: Markers = ("<think>", "</think>")
_THOUGHT: Markers = ("<|channel>thought", "<channel|>")
_READS_TOOLS = re.compile(r"\btools\b")
# What other formats write between Hermes's markers.
_NO_HERMES = ("<function=", "<arg_key>")
# Formats with markers of their own, which the chat templates of their models write.
_MARKED_FORMATS: Mapping[str, tuple[CallFormat, tuple[str, ...]]] = {
    "gemma4": (GEMMA4, ("<|tool_call>", "<tool_call|>")),
    "qwen3_coder": (QWEN3_CODER, ("<tool_call>", "<function=", "<parameter=")),
    "glm45": (GLM45, ("<tool_call>", "<arg_key>", "<arg_value>")),
    "minimax": (MINIMAX, ("<minimax:tool_call>", "<invoke name=", "<parameter name=")),
}


def read_response_template(spec: Mapping[str, Any]) -> tuple[_Markers | None, _Markers | None]:
    """Return the markers of tool calls and of reasoning in a response_template; None if they are missing.

    The template is a checkpoint's, as transformers 5 defines it. What is read of it: literal markers, `\\s*`
    before one, text for reasoning and content, and calls of {"name": ..., "arguments": ...}. Whatever else it
    asks for is refused by name.

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


@dataclass(frozen=True, slots=True)
class HarmonyUse:
    """The parts of harmony that are read.

    Attributes:
        harmony: the model's special tokens.
        calls: messages to functions are calls, not content.
        reasoning: messages of analysis are reasoning, not content.
    """

    harmony: Harmony
    calls: bool
    reasoning: bool


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """The formats that a model writes.

    Attributes:
        calls: the format of its tool calls; None: unknown, or harmony.
        why_no_calls: why the format is unknown.
        reasoning: the markers of its reasoning, if it reasons.
        shows_tools: its chat template shows tools and calls to it.
        harmony: it writes harmony.
    """

    calls: CallFormat | None
    why_no_calls: str
    reasoning: Markers | None
    shows_tools: bool
    harmony: HarmonyUse | None = None

    @property
    def can_call(self) -> bool:
        """Whether its calls can be read."""
        return self.calls is not None or (self.harmony is not None and self.harmony.calls)


def formats_of(
    tokenizer: Tokenizer | None, tool_call_parser: ToolCallParser, reasoning_parser: ReasoningParser
) -> ModelFormats:
    """Find out what a model writes, from its response template or else from its chat template.

    Args:
        tokenizer: the model's, if it has one.
        tool_call_parser: a format, or how to find it.
        reasoning_parser: likewise.
    """
    template = tokenizer.chat_template if tokenizer is not None else None
    source = "" if template is None else template.source_with_tools
    shows_tools = _READS_TOOLS.search(source) is not None
    own_calls, own_reasoning, why = _own_formats(tokenizer)
    calls = None
    if tool_call_parser == "none":
        why = "this server was started with --tool-call-parser none"
    elif tool_call_parser == "harmony":
        why = "the vocabulary or the chat template is not harmony's"
    elif tool_call_parser == "response_template":
        calls = own_calls
    elif tool_call_parser != "auto":
        calls = _by_name(tool_call_parser, source)
    else:
        calls = own_calls or _detected(source, shows_tools)
        why = f"the chat template is of no format that is known, and {why}; see --tool-call-parser"
    reasoning: Markers | None = None
    if reasoning_parser in ("auto", "response_template"):
        reasoning = own_reasoning
    if reasoning_parser == "think" or (
        reasoning_parser == "auto" and reasoning is None and any(marker in source for marker in _THINK)
    ):
        reasoning = _THINK
    if reasoning_parser == "gemma4" or (
        reasoning_parser == "auto"
        and reasoning is None
        and all(marker in source for marker in ("<|channel>", _THOUGHT[1]))
    ):
        reasoning = _THOUGHT
    harmony = None
    if tokenizer is not None and _is_harmony(source) and calls is None and reasoning is None:
        reads_calls = shows_tools and tool_call_parser in ("auto", "harmony")
        harmony = _harmony_use(tokenizer, reads_calls, reasoning_parser in ("auto", "harmony"))
    return ModelFormats(calls, why, reasoning, shows_tools, harmony)


def _is_harmony(source: str) -> bool:
    return CHANNEL in source and MESSAGE in source


def _harmony_use(tokenizer: Tokenizer, calls: bool, reasoning: bool) -> HarmonyUse | None:
    harmony = harmony_of(tokenizer) if calls or reasoning else None
    return None if harmony is None else HarmonyUse(harmony, calls, reasoning)


def _own_formats(tokenizer: Tokenizer | None) -> tuple[CallFormat | None, Markers | None, str]:
    """Return what a response template says, and why it says nothing about calls."""
    spec = tokenizer.response_template if tokenizer is not None else None
    if spec is None:
        return None, None, "the model has no response_template"
    try:
        markers, reasoning = read_response_template(spec)
    except UnsupportedModelError as error:
        logger.warning("%s", error)
        return None, None, str(error)
    calls = None if markers is None else hermes(markers)
    return calls, reasoning, "the model's response_template has no tool_calls"


def _by_name(name: str, source: str) -> CallFormat:
    if name == "hermes":
        return hermes()
    if name in _MARKED_FORMATS:
        return _MARKED_FORMATS[name][0]
    if name == "llama3_json":
        return LLAMA
    return MISTRAL if "[ARGS]" in source else MISTRAL_LIST


def _detected(source: str, shows_tools: bool) -> CallFormat | None:
    if _is_harmony(source):
        return None
    if not shows_tools:
        # Tools are described in a message then, and calls have the commonest format.
        return hermes()
    if "[TOOL_CALLS]" in source:
        return _by_name("mistral", source)
    for form, markers in _MARKED_FORMATS.values():
        if all(marker in source for marker in markers):
            return form
    if "<tool_call>" in source and "arguments" in source and not any(text in source for text in _NO_HERMES):
        return hermes()
    if "<|python_tag|>" in source or ("<|eot_id|>" in source and '"parameters"' in source):
        return LLAMA
    return None
