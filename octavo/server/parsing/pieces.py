"""What readers of a model's text yield, and how they look for markers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer.

    Attributes:
        kind: "reasoning" and "content" are text to show. "call" begins a tool call, "arguments" continues it,
            "complete" ends it. "broken" means that the call which has begun is none after all.
        text: of reasoning, content and arguments, the next characters; of "call" the function's name; of
            "complete" nothing; of "broken" all that was written since the call's marker, which is content.
    """

    kind: Literal["reasoning", "content", "call", "arguments", "complete", "broken"]
    text: str


def partial_marker(text: str, marker: str) -> int:
    """Return how many characters at the end of a text could be the beginning of a marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def marker_at(text: str, at: int, markers: Iterable[str]) -> str | None:
    """Return which marker stands at a position; an empty text: none; None: more text is needed to know."""
    found = ""
    for marker in markers:
        if text.startswith(marker, at):
            return marker
        if marker.startswith(text[at : at + len(marker)]):
            found = None
    return found
