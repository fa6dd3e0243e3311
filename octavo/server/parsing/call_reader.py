"""The state machine that divides tool calls from content, whatever their format; see calls.py.

    content ── marker ──► opening ── { ──► object ── } ──► closing ──► content
                             └── anything else: content ──┘

Everything since a marker is kept until its call is complete. If it is not a call, it is content.
"""

import re
import secrets
from collections.abc import Callable, Set

from octavo.server.parsing.call_body import CallBody
from octavo.server.parsing.call_object import CallObject
from octavo.server.parsing.pieces import Piece, partial_marker

_SPACE = re.compile(r"\s*")


class CallReader:
    """Divides content from tool calls. White space before a call, and between calls, is dropped.

    Attributes:
        num_calls: complete ones so far.
    """

    def __init__(self, names: Set[str], *markers: str) -> None:
        """Begin at an answer's beginning.

        Args:
            names: functions that may be called.
            markers: each begins a call; none begins like another one.
        """
        self.num_calls = 0
        self._markers = markers
        self._any_marker = re.compile("|".join(map(re.escape, markers)))
        self._names = names
        self._text = ""
        self._at = 0
        self._pieces: list[Piece] = []
        # White space that is content unless a call follows; within a call, everything since its marker.
        self._held: list[str] = []
        self._object: CallBody | None = None
        self._state: Callable[[], bool] = self._content

    @staticmethod
    def new_id() -> str:
        """Return an id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def feed(self, text: str) -> list[Piece]:
        """Take the next characters of an answer; return what is certain by now."""
        self._text = self._text[self._at :] + text
        self._at = 0
        while self._state():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back when the answer has ended. A call that is not complete is content."""
        if self._object is not None:
            self._break()
        rest = "".join(self._held) + self._text[self._at :]
        if rest and not (self.num_calls and rest.isspace()):
            self._pieces.append(Piece("content", rest))
        return self._pieces

    def _content(self) -> bool:
        """Look for a marker; False: more text is needed."""
        found = self._any_marker.search(self._text, self._at)
        if found is None:
            rest = self._text[self._at :]
            end = len(self._text) - max(partial_marker(rest, marker) for marker in self._markers)
            self._say(self._text[self._at : end])
            self._at = end
            return False
        self._say(self._text[self._at : found.start()])
        self._take(found.end(), found.start())
        self._state = self._after_marker(found[0])
        return True

    def _after_marker(self, marker: str) -> Callable[[], bool]:
        """Return what reads on after a marker."""
        return self._opening

    def _opening(self) -> bool:
        """Look for the call's object."""
        character = self._next()
        if character == "{":
            self._begin(self._new_object())
        elif character is not None:
            self._drop()
        return character is not None

    def _closing(self) -> bool:
        """Look for what follows an object."""
        raise NotImplementedError

    def _new_object(self) -> CallObject:
        return CallObject()

    def _reading(self) -> bool:
        """Read the object."""
        current = self._object
        assert current is not None
        self._at = current.feed(self._text, self._at)
        if current.is_broken:
            self._break()
            return True
        self._pieces += current.news()
        if not current.is_complete:
            return False
        self.num_calls += 1
        self._held, self._object = [], None
        self._state = self._closing
        return True

    def _begin(self, call: CallBody) -> None:
        self._object = call
        self._state = self._reading

    def _break(self) -> None:
        """Give up: what was read since the marker is not a call."""
        assert self._object is not None
        given = self._object.given_up("".join(self._held))
        self._held, self._object = [], None
        if given.kind == "broken":
            self._pieces.append(given)
        else:
            self._say(given.text)
        self._state = self._content

    def _drop(self) -> None:
        """Give up: no object follows the marker."""
        raw, self._held = "".join(self._held), []
        self._say(raw)
        self._state = self._content

    def _say(self, text: str) -> None:
        """Yield content, but hold white space at its end."""
        shown = text.rstrip()
        if shown:
            self._pieces.append(Piece("content", "".join(self._held) + shown))
            self._held = []
        if len(shown) < len(text):
            self._held.append(text[len(shown) :])

    def _take(self, end: int, begin: int | None = None) -> None:
        """Read on, and keep what was read."""
        self._held.append(self._text[self._at if begin is None else begin : end])
        self._at = end

    def _next(self) -> str | None:
        """Keep white space; return the character after it, None: more text is needed."""
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        if space.end() > self._at:
            self._take(space.end())
        return self._text[self._at : self._at + 1] or None

    def _matches(self, literal: str) -> bool | None:
        """Return whether a literal follows; None: more text is needed."""
        if self._text.startswith(literal, self._at):
            return True
        rest = self._text[self._at : self._at + len(literal)]
        return None if literal.startswith(rest) else False
