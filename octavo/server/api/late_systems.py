"""Conversations in which the system speaks later than the model's chat template allows."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from octavo.errors import ChatTemplateError
from octavo.tokenizer import ChatText
from octavo.tokenizer.messages import checked_messages

_SYSTEM = ("system", "developer")


def folding(
    render: Callable[..., ChatText], messages: Sequence[Mapping[str, Any]], **options: Any
) -> ChatText:
    """Render a conversation; if that is refused, then with later system turns as part of the turns before.

    So agents say what has changed. The next prompt begins with this one, as no text moves.

    Raises:
        ChatTemplateError: as `render`, for the conversation as it was given.
    """
    try:
        return render(messages, **options)
    except ChatTemplateError:
        with suppress(ChatTemplateError):
            if any(message["role"] in _SYSTEM for message in checked_messages(messages)[1:]):
                return render(_folded(messages), **options)
        raise


def _folded(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    folded: list[dict[str, Any]] = []
    for message in checked_messages(messages):
        before, text = folded[-1] if folded else message, f"<system>\n{message['content']}\n</system>"
        if message["role"] not in _SYSTEM or not folded:
            folded.append(message)
        elif before["role"] == "assistant":
            folded.append({"role": "user", "content": text})
        else:
            folded[-1] = before | {"content": f"{before['content']}\n\n{text}"}
    return folded
