"""Sees to it that each turn of a conversation is in its prompt.

Templates leave out roles they do not know, or a second system turn, without a word. A developer's turn
becomes the system's where a template knows no developers; any other turn that leaves no trace is refused.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.errors import ChatTemplateError
from octavo.tokenizer.messages import MESSAGE_KEYS

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_TAG_BEGINS, _TAG_ENDS = re.compile(r"\{[{%]"), re.compile(r"[%}]\}")
_QUOTED = re.compile(r"""(["'])([\w.-]+)\1""")
# A text of so many characters that comes in its place is no accident.
_TELLING_CHARS = 12
_MAX_SHAPES = 4096

Message = dict[str, Any]
Render = Callable[[list[Message]], str]


class Roles:
    """What turns one chat template shows.

    Args:
        source: the template.
    """

    def __init__(self, source: str) -> None:
        tags = [_TAG_ENDS.split(rest, 1)[0] for rest in _TAG_BEGINS.split(source)[1:]]
        quoted = {found[1] for tag in tags if "role" in tag for found in _QUOTED.findall(tag)}
        self._named = quoted - {*MESSAGE_KEYS}
        self._knows_developers = "developer" in source
        self._lost: dict[int, tuple[int, ...]] = {}

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
        as_system = _with_system(messages)
        if as_system is None or self._knows_developers:
            try:
                text = render(messages)
            except ChatTemplateError:
                if as_system is None:
                    raise
            else:
                lost = self._left_out(messages, text, render, settings)
                if not lost:
                    return text
                if as_system is None or all(messages[index]["role"] != "developer" for index in lost):
                    raise _left_out_error(messages, lost[0])
        assert as_system is not None
        text = render(as_system)
        lost = self._left_out(as_system, text, render, settings)
        if lost:
            raise _left_out_error(messages, lost[0])
        return text

    def _left_out(
        self, messages: list[Message], text: str, render: Render, settings: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Return the turns without a trace. If the text does not tell, a conversation like it does."""
        if _are_in_order(messages, text):
            return ()
        shape = hash((*map(_shape, messages), json.dumps(settings, sort_keys=True)))
        lost = self._lost.get(shape)
        if lost is None:
            if len(self._lost) >= _MAX_SHAPES:
                self._lost.clear()
            lost = self._lost[shape] = _lost_probes(messages, render)
        return lost


def _with_system(messages: list[Message]) -> list[Message] | None:
    """Return messages with developers as the system; None: there are no developers."""
    if all(message["role"] != "developer" for message in messages):
        return None
    return [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]


def _left_out_error(messages: Sequence[Message], index: int) -> ChatTemplateError:
    return ChatTemplateError(
        f"messages[{index}]: the model's chat template leaves out this turn of the role "
        f"{messages[index]['role']!r}; give its text another role or place, such as the first system turn"
    )


def _are_in_order(messages: Sequence[Message], text: str) -> bool:
    """Return whether what each message says is in the text as it is, one after the other."""
    position = 0
    for message in messages:
        said = (message["content"] or "").strip() or _longest_argument(message)
        if said is None:
            continue
        found = text.find(said, position) if len(said) >= _TELLING_CHARS else -1
        if found < 0:
            return False
        position = found + len(said)
    return True


def _longest_argument(message: Message) -> str | None:
    """Return a text that a message's calls say; None: it has no calls, and says nothing."""
    calls = message.get("tool_calls")
    if not calls:
        return None
    arguments = [call["function"].get("arguments") for call in calls]
    texts = [text for entry in arguments if isinstance(entry, dict) for text in entry.values()]
    return max((text for text in texts if isinstance(text, str)), key=len, default="")


def _shape(message: Message) -> tuple[Any, ...]:
    content, calls = (message["content"] or "").strip(), message.get("tool_calls") or ()
    return message["role"], bool(content), len(calls), *sorted(message)


def _lost_probes(messages: list[Message], render: Render) -> tuple[int, ...]:
    """Render the conversation with a word of its own for each turn; return the turns without their word."""
    words = {index: f"turn{index:x}q7z" for index, message in enumerate(messages) if _says_something(message)}
    probes = [
        _probe(message, words[index]) if index in words else message for index, message in enumerate(messages)
    ]
    try:
        text = render(probes).casefold()
    except ChatTemplateError:  # it wants certain texts, and then it has looked at them
        return ()
    return tuple(index for index, word in words.items() if word not in text)


def _says_something(message: Message) -> bool:
    return bool((message["content"] or "").strip() or message.get("tool_calls"))


def _probe(message: Message, word: str) -> Message:
    probe = dict(message)
    if (message["content"] or "").strip():
        probe["content"] = word
    if message.get("tool_calls"):
        probe["tool_calls"] = [
            call | {"function": call["function"] | {"name": word}} for call in message["tool_calls"]
        ]
    return probe
