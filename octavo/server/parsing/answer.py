"""Reads one answer: reasoning first, then content with tool calls in it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from octavo.server.parsing.call_reader import CallReader
from octavo.server.parsing.piece import Piece, partial_marker


class ReasoningReader:
    """Reads reasoning at an answer's beginning; white space around it is dropped.

    A marker later in the text is content: somebody may be writing about it.
    """

    def __init__(self, begin: str, end: str, *, has_begun: bool) -> None:
        """Start at the beginning of an answer.

        Args:
            begin: opens the reasoning.
            end: closes it.
            has_begun: the prompt opened it.
        """
        self._begin = begin
        self._end = end
        self._state = "inside" if has_begun else "before"
        # White space that may be dropped.
        self._space: list[str] = []
        self._is_first = True
        self._text = ""

    def feed(self, text: str) -> list[Piece]:
        """Take the next characters; return what is certain by now."""
        if self._state == "outside":
            return [Piece("content", text)] if text else []
        pieces: list[Piece] = []
        self._text += text
        if self._state == "before":
            self._before(pieces)
        if self._state == "inside":
            self._inside(pieces)
        if self._state == "after":
            self._after(pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back when the answer has ended."""
        text = "".join(self._space) + self._text
        if self._state == "inside":
            return [Piece("reasoning", text)] if self._text else []
        return [Piece("content", text)] if text and self._state == "before" else []

    def _before(self, pieces: list[Piece]) -> None:
        word = self._text.lstrip()
        self._space.append(self._text[: len(self._text) - len(word)])
        self._text = word
        if word.startswith(self._begin):
            self._text = word[len(self._begin) :]
            self._space = []
            self._state = "inside"
        elif not self._begin.startswith(word):
            pieces.append(Piece("content", "".join(self._space) + word))
            self._text, self._state = "", "outside"

    def _inside(self, pieces: list[Piece]) -> None:
        at = self._text.find(self._end)
        end = len(self._text) - partial_marker(self._text, self._end) if at < 0 else at
        part, self._text = self._text[:end], self._text[end:]
        if self._is_first:
            part = part.lstrip()
        shown = part.rstrip()
        if shown:
            pieces.append(Piece("reasoning", "".join(self._space) + shown))
            self._space, self._is_first = [], False
        if part != shown:
            self._space.append(part[len(shown) :])
        if at >= 0:
            self._text = self._text[len(self._end) :]
            self._space, self._state = [], "after"

    def _after(self, pieces: list[Piece]) -> None:
        text, self._text = self._text.lstrip(), ""
        if text:
            pieces.append(Piece("content", text))
            self._state = "outside"


class Reader(Protocol):
    """Divides one answer; what it yields does not depend on how the answer is cut.

    Attributes:
        num_calls: complete calls so far.
    """

    @property
    def num_calls(self) -> int: ...

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Piece]:
        """Take the next characters and the ids of their tokens; return what is certain by now."""
        ...

    def finish(self) -> list[Piece]:
        """Return what was held back when the answer has ended."""
        ...

    def new_id(self) -> str:
        """Return an id for a call."""
        ...


class AnswerReader:
    """Divides one answer by markers in its text."""

    def __init__(self, reasoning: ReasoningReader | None, calls: CallReader | None) -> None:
        """Start at the beginning of an answer.

        Args:
            reasoning: divides reasoning from the rest; None: there is none.
            calls: divides tool calls from content; None: all is content.
        """
        self._reasoning = reasoning
        self._calls = calls

    @property
    def num_calls(self) -> int:
        """Complete calls so far."""
        return self._calls.num_calls if self._calls is not None else 0

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Piece]:
        """Take the next characters, whichever tokens they belong to; return what is certain by now."""
        if self._reasoning is None:
            return self._content(text)
        return self._divided(self._reasoning.feed(text))

    def finish(self) -> list[Piece]:
        """Return what was held back when the answer has ended."""
        pieces = [] if self._reasoning is None else self._divided(self._reasoning.finish())
        return pieces + (self._calls.finish() if self._calls is not None else [])

    def new_id(self) -> str:
        """Return an id for a call."""
        assert self._calls is not None
        return self._calls.new_id()

    def _divided(self, pieces: list[Piece]) -> list[Piece]:
        return [
            part
            for piece in pieces
            for part in (self._content(piece.text) if piece.kind == "content" else [piece])
        ]

    def _content(self, text: str) -> list[Piece]:
        if self._calls is not None:
            return self._calls.feed(text)
        return [Piece("content", text)] if text else []


@dataclass(slots=True)
class Call:
    """A complete tool call.

    Attributes:
        id: made for this call.
        name: the function's.
        arguments: a JSON object, as the model wrote it; a custom tool's text.
        is_custom: the tool is a custom one.
    """

    id: str
    name: str
    arguments: str = ""
    is_custom: bool = False


@dataclass(slots=True)
class Answer:
    """A whole answer.

    Attributes:
        content: its text.
        reasoning: what came before it.
        calls: complete tool calls.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def read_answer(reader: Reader, text: str, token_ids: Sequence[int] = ()) -> Answer:
    """Divide a whole answer. Calls that break off are content."""
    pieces = read_pieces(reader, text, token_ids)
    answer = Answer(
        "".join(piece.text for piece in pieces if piece.kind == "content"),
        "".join(piece.text for piece in pieces if piece.kind == "reasoning"),
    )
    arguments: list[str] = []
    for piece in pieces:
        if piece.kind in ("call", "custom"):
            arguments = []
            answer.calls.append(Call(reader.new_id(), piece.text, is_custom=piece.kind == "custom"))
        elif piece.kind in ("arguments", "input"):
            arguments.append(piece.text)
        elif piece.kind == "complete":
            answer.calls[-1].arguments = "".join(arguments)
    return answer


def read_pieces(reader: Reader, text: str, token_ids: Sequence[int] = ()) -> list[Piece]:
    """Return the pieces of a whole answer, in order. Calls that break off are content."""
    settled: list[Piece] = []
    call: list[Piece] = []
    for piece in reader.feed(text, token_ids) + reader.finish():
        if piece.kind in ("content", "reasoning"):
            settled.append(piece)
        elif piece.kind == "broken":
            call = []
            settled.append(Piece("content", piece.text))
        else:
            call.append(piece)
            if piece.kind == "complete":
                settled += call
                call = []
    return settled
