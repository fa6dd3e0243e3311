"""Conversations in which the system speaks later than the model's chat template allows."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from octavo.errors import ChatTemplateError
from octavo.tokenizer import ChatText
from octavo.tokenizer.messages import checked_messages

Messages = Sequence[Mapping[str, Any]]
_SYSTEM = ("system", "developer")


def folding(render: Callable[..., ChatText], messages: Messages, **options: Any) -> ChatText:
    """Render a conversation; if it is refused, then with each later system turn in the turn before it.

    Agents say there what has changed. Nothing moves, so that the next prompt begins with this one.

    Raises:
        ChatTemplateError: as `render`, for the conversation as it was given.
    """
    try:
        return render(messages, **options)
    except ChatTemplateError:
        with suppress(ChatTemplateError):
            folded = _folded(messages)
            if folded != checked_messages(messages):
                return render(folded, **options)
        raise


def _folded(messages: Messages) -> list[dict[str, Any]]:
    folded: list[dict[str, Any]] = []
    for message in checked_messages(messages):
        if message["role"] not in _SYSTEM or not folded:
            folded.append(message)
            continue
        before, text = folded[-1], message["content"]
        if before["role"] not in _SYSTEM:
            text = f"<system>\n{text}\n</system>"
        if before["role"] == "assistant":
            folded.append({"role": "user", "content": text})
        else:
            folded[-1] = before | {"content": f"{before['content']}\n\n{text}"}
    return folded
