"""Which forms of the assistant's turns a chat template may ask for.

An answer may have calls and no content, content and calls, or nothing at all. Templates differ in which of these they
take, and none may refuse what its own model said.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# `message.content is none`, `content != None`, `message['content'] is not none`; but not of reasoning_content.
_ASKS_FOR_NULL = re.compile(
    r"""(?<!\w)content["']?[\])]*\s*(?:is\s+(?:not\s+)?|[!=]=\s*)none\b""", re.IGNORECASE
)
Messages = list[dict[str, Any]]


def forms_of(messages: Sequence[Mapping[str, Any]], source: str) -> Iterator[Messages]:
    """Yield a conversation as a template may read it, the likeliest form first.

    1. The content of a call's turn is null if it is null in the conversation and the template asks for that.
       Otherwise it is an empty text: who does not ask would print the word None, or look for text in it.
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
        pairs = zip(messages, texts, strict=True)
        forms.insert(0, [dict(given) if "tool_calls" in given else text for given, text in pairs])
    for index, form in enumerate(forms):
        if form not in forms[:index]:
            yield form


def _turns(message: dict[str, Any]) -> Messages:
    has_calls = "tool_calls" in message
    if message["role"] != "assistant" or bool(message["content"]) != has_calls:
        return [message]
    if not has_calls:
        return [message | {"content": " "}]
    calls = {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
    return [{key: value for key, value in message.items() if key != "tool_calls"}, calls]
