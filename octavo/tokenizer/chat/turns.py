"""Which forms of the assistant's turns a chat template may ask for.

An answer may have calls and no content, content and calls, or nothing at all. Templates differ in which of
these they take, and none may refuse what its own model said.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from octavo.errors import ChatTemplateError

# `content is none`, `message.content != None`, `message['content'] is not none`; no reasoning_content.
_ASKS_FOR_NULL = re.compile(
    r"""(?<!\w)content["']?[\])]*\s*(?:is\s+(?:not\s+)?|[!=]=\s*)none\b""", re.IGNORECASE
)
Messages = list[dict[str, Any]]


def rendered(messages: Sequence[Mapping[str, Any]], source: str, render: Callable[[Messages], str]) -> str:
    """Render the first form of a conversation that a template takes.

    A null is for a template to look at. Where one prints the word None for it, a form without nulls comes
    first, if it shows the same calls.

    Args:
        messages: checked ones.
        source: of the template.
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
       have null there, and streams begin with an empty text. Otherwise it is an empty text: who does not
       ask would print the word None, or look for text in it.
    2. It is an empty text in any case.
    3. A turn with content and calls is two turns, and one of nothing is a space.

    Forms that are the same are yielded once.

    Args:
        messages: checked ones.
        source: of the template.
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
