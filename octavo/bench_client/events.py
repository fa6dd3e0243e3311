"""Reads a stream of server-sent events, as far as a measurement needs them."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

_MAX_MESSAGE_CHARS = 200


class Delta(Struct):
    """What is new in a chat; servers name the tokens of a reasoning model differently."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class Choice(Struct):
    """What is new in one answer."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_tokens(self) -> bool:
        """True if a reader sees something new."""
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class Usage(Struct):
    """Tokens of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Event(Struct):
    """One event of either endpoint."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(Event).decode


class EventReader:
    """Cuts the pieces of an answer into events.

    Attributes:
        is_done: whether [DONE] came.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.is_done = False

    def read(self, piece: bytes) -> Iterator[Event]:
        """Yield the events that a piece completes.

        Raises:
            msgspec.DecodeError: what came is no event of OpenAI's API.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self.is_done = True
            else:
                yield _decode_event(data)


def error_message(body: bytes) -> str:
    """Return the sentence in an error body, of whatever form a server has, or the start of the body."""
    try:
        return message_in(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return message_in(body.decode("utf-8", "replace"))


def message_in(found: Any) -> str:
    """Return the sentence in what an error body was decoded to."""
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    text = found if isinstance(found, str) else msgspec.json.encode(found).decode()
    return " ".join(text.split())[:_MAX_MESSAGE_CHARS]
