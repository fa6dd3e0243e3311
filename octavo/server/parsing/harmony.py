"""The format of gpt-oss (harmony): messages in channels, divided by special tokens.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
            a call:  <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.tokenizer import Tokenizer

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"

_CHANNELS = ("analysis", "commentary", "final")
_FUNCTIONS = "functions."
# Headers are short: anything longer is text.
_MAX_CHARS = 256
_MAX_WORDS = 3
# Arguments begin with one of these, if the token is missing that should separate them from the header.
_NO_HEADER = re.compile(r'[\n{}"]')


@dataclass(frozen=True, slots=True)
class Harmony:
    """A model that writes harmony.

    Attributes:
        tokenizer: the model's.
        ids: those of the special tokens, by their pieces.
        pieces: the pieces by their ids.
    """

    tokenizer: Tokenizer
    ids: Mapping[str, int]
    pieces: Mapping[int, str]


def harmony_of(tokenizer: Tokenizer) -> Harmony | None:
    """Return a model's harmony tokens, or None if its vocabulary lacks one."""
    ids: dict[str, int] = {}
    for piece in (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL):
        found = tokenizer.encode(piece, add_special_tokens=False)
        if len(found) != 1 or found[0] not in tokenizer.special_ids:
            return None
        ids[piece] = found[0]
    return Harmony(tokenizer, ids, {token_id: piece for piece, token_id in ids.items()})


def open_channel(prompt: str) -> str | None:
    """Return the channel of the message the prompt leaves open, as when an answer is being continued."""
    _, _, message = prompt.rpartition(START)
    header, opened, _ = message.partition(MESSAGE)
    if not opened or any(end in message for end in (END, RETURN, CALL)):
        return None
    return (header.partition(CHANNEL)[2].split() or ["final"])[0]


def shown_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as harmony's chat templates read them: reasoning is `thinking`, a message has one call.

    Args:
        messages: checked ones (tokenizer/messages.py).
    """
    shown: list[dict[str, Any]] = []
    # Further calls of one message, by their ids; each is shown just before its result.
    later: dict[str, dict[str, Any]] = {}
    for message in messages:
        if message["role"] == "tool":
            call = later.pop(message.get("tool_call_id", ""), None)
            shown += [] if call is None else [_with_call(call)]
        else:
            shown += map(_with_call, later.values())
            others = (message.get("tool_calls") or ())[1:]
            later = {str(call.get("id", index)): call for index, call in enumerate(others)}
        shown.append(_shown(message))
    return shown + [_with_call(call) for call in later.values()]


def _with_call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert one message. Templates have a single place for the text before a call."""
    shown = {name: value for name, value in message.items() if name != "reasoning_content"}
    thinking = message.get("reasoning_content")
    if shown.get("tool_calls"):
        shown["tool_calls"] = shown["tool_calls"][:1]
        if thinking is not None and shown["content"]:
            thinking = f"{thinking}\n{shown['content']}"
        # Templates search it for markup, and fail for null.
        shown["content"] = "" if thinking is not None else shown["content"] or ""
    return shown if thinking is None else shown | {"thinking": thinking}


class Header:
    """The header of a message: who speaks to whom, the channel, and the kind of text.

    Attributes:
        channel: its name; empty: none.
        is_marked: a special token opened it.
    """

    def __init__(self) -> None:
        self.is_marked = False
        self._texts = {START: "", CHANNEL: "", CONSTRAIN: ""}
        self._written: list[str] = []
        self._part = START

    @property
    def text(self) -> str:
        """The whole header, as it was written."""
        return "".join(self._written)

    @property
    def channel(self) -> str:
        """The channel's name; empty: none."""
        return (self._texts[CHANNEL].split() or [""])[0]

    def mark(self, piece: str) -> None:
        """Go on after a special token."""
        self.is_marked = True
        self._part = piece
        self._texts[piece] = ""

    def add(self, text: str) -> bool:
        """Take more text; return whether it can still be a header."""
        self._written.append(text)
        self._texts[self._part] += text
        found = self._texts[self._part]
        if len(found) > _MAX_CHARS or _NO_HEADER.search(found) or len(found.split()) > _MAX_WORDS:
            return False
        return self.is_marked or _is_role(found)

    def function(self) -> str | None:
        """Return the function that the message is addressed to; None if there is none, or several."""
        words = " ".join(self._texts.values()).split()
        found = {word.removeprefix("to=") for word in words if word.startswith("to=")}
        name = found.pop() if len(found) == 1 else ""
        return name.removeprefix(_FUNCTIONS) if name.startswith(_FUNCTIONS) else None

    def is_empty(self) -> bool:
        """Return whether it can be dropped: it names only a role and a channel, or begins to."""
        if not self.is_marked:
            return not self.text
        channel = self.channel
        return _is_role(self._texts[START]) and any(known.startswith(channel) for known in _CHANNELS)


def _is_role(text: str) -> bool:
    """Return whether a text may begin the header of an answer: assistant to=functions.f."""
    rest = text.strip().removeprefix("assistant").lstrip()
    if rest.startswith("to="):
        return len(rest.split()) == 1
    return "to=".startswith(rest) or ("assistant".startswith(rest) and text.strip() == rest)
