"""Pieces that readers of a model's text yield, the search for markers, and the state of one call."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer.

    Attributes:
        kind: "reasoning" and "content" are text to show. "call" begins a tool call, "arguments" continues it,
            "complete" ends it; of a custom tool (custom/) they are "custom", "input" and "complete". "broken"
            means that what began as a call is none.
        text: the next characters of reasoning, content and arguments; for "call" the function's name; for
            "complete" nothing; for "broken" everything since the call's marker, which is content.
    """

    kind: Literal["reasoning", "content", "call", "arguments", "custom", "input", "complete", "broken"]
    text: str


def partial_marker(text: str, marker: str) -> int:
    """Return how many characters at the end of a text could be the beginning of a marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def marker_at(text: str, at: int, markers: Iterable[str]) -> str | None:
    """Return the marker at a position, an empty text for none, or None if more text is needed to know."""
    found = ""
    for marker in markers:
        if text.startswith(marker, at):
            return marker
        if marker.startswith(text[at : at + len(marker)]):
            found = None
    return found


class CallBody:
    """A call between its opening marker and its closing one.

    Attributes:
        name: the function's, once it is known.
        has_arguments: they have begun.
        is_complete: it has ended, and is a call.
        is_broken: it cannot become a call any more.
    """

    def __init__(self, name: str | None = None) -> None:
        """Start after the opening marker; `name` is the function's, if it is known already."""
        self.name = name
        self.has_arguments = self.is_complete = self.is_broken = False
        self._is_announced = False
        self._raw: list[str] = []
        # New text of the arguments. Their last brace comes only when the call is complete, so the arguments
        # of a call that breaks off are never a whole object.
        self._arguments: list[str] = []

    @property
    def raw(self) -> str:
        """Everything that was read."""
        return "".join(self._raw)

    @property
    def has_begun(self) -> bool:
        """Whether anything was read."""
        return bool(self._raw)

    def feed(self, text: str, begin: int) -> int:
        """Read on from a position; return where the call ended or broke, or the text's end."""
        raise NotImplementedError

    def news(self) -> list[Piece]:
        """Return what is new in a call that is not broken."""
        if self.name is None or not self.has_arguments:
            return []
        pieces = [] if self._is_announced else [Piece("call", self.name)]
        self._is_announced = True
        if self._arguments:
            pieces.append(Piece("arguments", "".join(self._arguments)))
            self._arguments.clear()
        if self.is_complete:
            pieces.append(Piece("complete", ""))
        return pieces

    @property
    def kind_of_rest(self) -> Literal["content", "broken"]:
        """The kind of everything since its marker if it never becomes a call."""
        return "broken" if self._is_announced else "content"
