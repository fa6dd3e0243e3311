"""Sees to it that each turn of a conversation is in its prompt, in a form that the chat template takes.

Templates leave out roles they do not know, or a second system turn, without a word. A developer's turn
becomes the system's where a template knows no developers, and calls that a template leaves out are written
into the text of their turn; any other turn that leaves no trace is refused.

An answer may have calls and no content, content and calls, or nothing at all. Templates differ in which of
these they take, and none may refuse what its own model said.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from octavo.errors import ChatTemplateError
from octavo.tokenizer.messages import MESSAGE_KEYS

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_TAG_BEGINS, _TAG_ENDS = re.compile(r"\{[{%]"), re.compile(r"[%}]\}")
_QUOTED = re.compile(r"""(["'])([\w.-]+)\1""")
# A text of at least this length that appears in its place is no coincidence.
_TELLING_CHARS = 12
_MAX_SHAPES = 4096

Message = dict[str, Any]
Render = Callable[[list[Message]], str]
# `content is none`, `message.content != None`, `message['content'] is not none`; no reasoning_content.
_ASKS_FOR_NULL = re.compile(
    r"""(?<!\w)content["']?[\])]*\s*(?:is\s+(?:not\s+)?|[!=]=\s*)none\b""", re.IGNORECASE
)
Messages = list[dict[str, Any]]


class Roles:
    """Knows which turns a chat template shows.

    Args:
        source: the template.
    """

    def __init__(self, source: str) -> None:
        tags = [_TAG_ENDS.split(rest, 1)[0] for rest in _TAG_BEGINS.split(source)[1:]]
        quoted = {found[1] for tag in tags if "role" in tag for found in _QUOTED.findall(tag)}
        self._named = quoted - {*MESSAGE_KEYS}
        self._knows_developers = "developer" in source
        self._lost: dict[int, _Lost] = {}

    def check(self, messages: Sequence[Message]) -> None:
        """Refuse roles that neither OpenAI's API nor the template knows.

        Raises:
            ChatTemplateError: there is one; it is named.
        """
        for index, message in enumerate(messages):
            role = message["role"]
            if role not in ROLES and role not in self._named:
                raise ChatTemplateError(
                    f"messages[{index}].role: expected one of {', '.join(ROLES)}, got {role[:200]!r}"
                )

    def rendered(self, messages: list[Message], render: Render, settings: Mapping[str, Any]) -> str:
        """Render a conversation; developers are the system where the template needs it.

        Args:
            messages: checked ones.
            render: from messages to a text.
            settings: what else the text depends on.

        Raises:
            ChatTemplateError: the template fails, or it leaves a turn out; the error names it.
        """
        if any(message["role"] == "developer" for message in messages):
            if self._knows_developers:
                with suppress(ChatTemplateError):
                    return self._complete(messages, render, settings)
            as_system = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
            return self._complete(as_system, render, settings, [m["role"] for m in messages])
        return self._complete(messages, render, settings)

    def _complete(
        self,
        messages: list[Message],
        render: Render,
        settings: Mapping[str, Any],
        roles: Sequence[str] | None = None,
    ) -> str:
        text = render(messages)
        lost = self._left_out(messages, text, render, settings)
        if lost.calls:
            messages = [_written(m) if index in lost.calls else m for index, m in enumerate(messages)]
            text = render(messages)
            lost = self._left_out(messages, text, render, settings)
        for index in lost.turns:
            raise ChatTemplateError(
                f"messages[{index}]: the model's chat template leaves out this turn of the role "
                f"{roles[index] if roles else messages[index]['role']!r}; give its text another role or "
                "place, such as the first system turn"
            )
        return text

    def _left_out(
        self, messages: list[Message], text: str, render: Render, settings: Mapping[str, Any]
    ) -> "_Lost":
        """Return what left no trace. If the text does not show it, a conversation of the same shape does."""
        if _are_in_order(messages, text):
            return _NOTHING
        shape = hash((*map(_shape, messages), json.dumps(settings, sort_keys=True)))
        lost = self._lost.get(shape)
        if lost is None:
            if len(self._lost) >= _MAX_SHAPES:
                self._lost.clear()
            lost = self._lost[shape] = _probed(messages, render)
        return lost


@dataclass(frozen=True, slots=True)
class _Lost:
    """Messages that a template leaves out, by index: whole turns, and calls of tools."""

    turns: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()


_NOTHING = _Lost()


def _said(message: Message) -> str:
    return (message.get("content") or "").strip()


def _are_in_order(messages: Sequence[Message], text: str) -> bool:
    """Return whether what each message says is in the text as it is, one after the other."""
    position = 0
    for message in messages:
        said = _longest_argument(message) if message.get("tool_calls") else _said(message)
        if not said and not message.get("tool_calls"):
            continue
        found = text.find(said, position) if len(said) >= _TELLING_CHARS else -1
        if found < 0:
            return False
        position = found + len(said)
    return True


def _longest_argument(message: Message) -> str:
    arguments = [call["function"].get("arguments") for call in message["tool_calls"]]
    texts = [text for entry in arguments if isinstance(entry, dict) for text in entry.values()]
    return max((text for text in texts if isinstance(text, str)), key=len, default="")


def _shape(message: Message) -> tuple[Any, ...]:
    return message["role"], bool(_said(message)), len(message.get("tool_calls") or ()), *sorted(message)


def _probed(messages: list[Message], render: Render) -> _Lost:
    """Render the conversation with a unique word in each turn, and look for these words.

    Some templates show the system's turn only while a user's is the last. So a turn counts as shown, too, if
    the conversation shows it when it ends with its last user's turn.
    """
    turns = {index for index, m in enumerate(messages) if _said(m) or m.get("tool_calls")}
    calls = {index for index, m in enumerate(messages) if m.get("tool_calls")}
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    for end in (len(messages), *(index + 1 for index in users[-1:])):
        if not turns and not calls:
            break
        try:
            text = render([_probe(message, index) for index, message in enumerate(messages[:end])]).casefold()
        except ChatTemplateError:  # the template wants certain texts, so it has looked at them
            return _NOTHING
        calls = {index for index in calls if _word("call", index) not in text}
        turns = {i for i in turns if _word("turn", i) not in text and _word("call", i) not in text}
    return _Lost(tuple(sorted(turns - calls)), tuple(sorted(calls)))


def _word(kind: str, index: int) -> str:
    return f"{kind}{index:x}q7z"


def _probe(message: Message, index: int) -> Message:
    probe = dict(message)
    if _said(message):
        probe["content"] = _word("turn", index)
    if message.get("tool_calls"):
        function = {"name": _word("call", index)}
        probe["tool_calls"] = [
            call | {"function": call["function"] | function} for call in message["tool_calls"]
        ]
    return probe


def _written(message: Message) -> Message:
    """Return a message whose calls are part of its text, in the form that most models read."""
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [{"name": function.get("name"), "arguments": function["arguments"]} for function in functions]
    texts = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return rest | {"content": "\n".join(filter(None, (message.get("content"), *texts)))}


def rendered(messages: Sequence[Mapping[str, Any]], source: str, render: Callable[[Messages], str]) -> str:
    """Render the first form of a conversation that a template takes.

    A template should only test a null. If it prints the word None for one, a form without nulls is preferred,
    if that shows the same calls.

    Args:
        messages: checked ones.
        source: the template's source.
        render: renders one form.

    Raises:
        ChatTemplateError: the template refuses every form; this is what it said of the first one.
    """
    refusal: ChatTemplateError | None = None
    spoiled: str | None = None
    for form in forms_of(messages, source):
        try:
            text = render(form)
        except ChatTemplateError as error:
            refusal = refusal or error
            continue
        if spoiled is not None:
            return text if _is_better(text, spoiled, form) else spoiled
        if "None" not in text or all(message["content"] is not None for message in form):
            return text
        spoiled = text
    if spoiled is None:
        assert refusal is not None
        raise refusal
    return spoiled


def _is_better(text: str, spoiled: str, form: Messages) -> bool:
    """Return whether a text has the word None less often than another one, and shows the same calls."""
    names = {str(call["function"].get("name")) for turn in form for call in turn.get("tool_calls", ())}
    has_all = all(text.count(name) == spoiled.count(name) for name in names - {""})
    return has_all and text.count("None") < spoiled.count("None")


def forms_of(messages: Sequence[Mapping[str, Any]], source: str) -> Iterator[Messages]:
    """Yield a conversation as a template may read it, the likeliest form first.

    1. The content of a call's turn is null if there is none and the template asks for that; whole answers
       have null there, and streams begin with an empty text. Otherwise it is an empty text: a template that
       does not ask would print the word None, or search it.
    2. It is an empty text in any case.
    3. A turn with content and calls becomes two turns, and an empty turn becomes a space.

    Forms that are the same are yielded once.

    Args:
        messages: checked ones.
        source: the template's source.
    """
    texts = [dict(message) | {"content": message["content"] or ""} for message in messages]
    forms = [texts, [turn for message in texts for turn in _turns(message)]]
    if _ASKS_FOR_NULL.search(source):
        forms.insert(0, [_with_null(message) for message in texts])
    for index, form in enumerate(forms):
        if form not in forms[:index]:
            yield form


def _with_null(message: dict[str, Any]) -> dict[str, Any]:
    return message if message["content"] or "tool_calls" not in message else message | {"content": None}


def _turns(message: dict[str, Any]) -> Messages:
    has_calls = "tool_calls" in message
    if message["role"] != "assistant" or bool(message["content"]) != has_calls:
        return [message]
    if not has_calls:
        return [message | {"content": " "}]
    calls = {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
    return [{key: value for key, value in message.items() if key != "tool_calls"}, calls]
