"""The state machine that divides tool calls from content, whatever their format; see calls.py.

    content ── marker ──► opening ── { ──► object ── } ──► settling ──► closing ──► content
                             └── anything else: content ──┘ └── more JSON: content ──┘

Everything since a marker is kept until its call is settled. If it is not a call, it is content. If JSON goes
on after an object, the object was closed too early and lacks a part: it is no call. One extra brace at the
end is dropped.
"""

import re
import secrets
from collections.abc import Callable, Sequence, Set
from typing import Literal

from octavo.server.parsing.json_call import CallObject
from octavo.server.parsing.piece import CallBody, Piece, marker_at, partial_marker

# Characters that, after an object, show that it was closed too early.
GOES_ON = frozenset(',:]}"')
_SPACE = re.compile(r"\s*")


class CallReader:
    """Divides content from tool calls. White space before a call, and between calls, is dropped.

    Attributes:
        begins: how an object begins after its marker.
        num_calls: complete ones so far.
    """

    begins = "{"

    def __init__(self, names: Set[str], *markers: str) -> None:
        """Start at the beginning of an answer.

        Args:
            names: functions that may be called.
            markers: each begins a call; none begins like another one.
        """
        self.num_calls = 0
        self._look_for(markers)
        self._names = names
        self._text = ""
        self._at = 0
        self._pieces: list[Piece] = []
        # White space that is content unless a call follows; within a call, everything since its marker.
        self._pending: list[str] = []
        # Everything since the marker of an object that is not settled yet.
        self._whole = ""
        self._has_extra = False
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
        if self._state in (self._settling, self._after_comma):
            self._settle()
        elif self._object is not None:
            self._break()
        rest = "".join(self._pending) + self._text[self._at :]
        if rest and not (self.num_calls and rest.isspace()):
            self._pieces.append(Piece("content", rest))
        return self._pieces

    def _look_for(self, markers: Sequence[str]) -> None:
        self._markers = tuple(markers)
        self._any_marker = re.compile("|".join(map(re.escape, markers)))

    def _content(self) -> bool:
        """Look for a marker; return False if more text is needed."""
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
        """Look for the call's object. A repeated marker counts once."""
        if self._next() is None:
            return False
        marker = marker_at(self._text, self._at, (*self._markers, self.begins))
        if marker == self.begins:
            self._begin(self._new_object())
        elif marker:
            self._take(self._at + len(marker))
            self._state = self._after_marker(marker)
        elif marker is not None:
            self._drop()
        return marker is not None

    def _closing(self) -> bool:
        """Look for what follows an object."""
        raise NotImplementedError

    def _new_object(self) -> CallBody:
        return CallObject()

    def _reading(self) -> bool:
        """Read the object."""
        current = self._object
        assert current is not None
        self._at = current.feed(self._text, self._at)
        if current.is_broken:
            self._break()
            return True
        if not current.is_complete:
            self._pieces += current.news()
            return False
        self._whole, self._pending = "".join(self._pending) + current.raw, []
        self._has_extra = False
        self._state = self._settling
        return True

    def _settling(self) -> bool:
        """Look for what shows whether the object is a call."""
        character = self._next()
        if character == "}" and not self._has_extra:
            self._has_extra = True
            self._take_in(self._at + 1)
        elif character == ",":
            self._take(self._at + 1)
            self._state = self._after_comma
        elif character is not None and character in GOES_ON and not self._ends_list(character):
            self._break()
        elif character is not None:
            self._settle()
            if character == "{":
                self._begin(self._new_object())
        return character is not None

    def _after_comma(self) -> bool:
        """Look for another object; a member of the one before would show that it ended too early."""
        character = self._next()
        if character is None:
            return False
        if character in GOES_ON:
            self._break()
            return True
        self._settle()
        if character == "{":
            self._begin(self._new_object())
        else:
            self._drop()
        return True

    def _ends_list(self, character: str) -> bool:
        """Return whether a character ends a list of calls."""
        return False

    def _settle(self) -> None:
        """Yield the object as a call."""
        assert self._object is not None
        self._pieces += self._object.news()
        self.num_calls += 1
        self._whole, self._object = "", None
        self._state = self._closing

    def _begin(self, call: CallBody) -> None:
        self._object = call
        self._state = self._reading

    def _break(self) -> None:
        """Give up: what was read since the marker is not a call."""
        call, pending = self._object, "".join(self._pending)
        assert call is not None
        text = self._whole + pending if self._whole else pending + call.raw
        self._pending, self._whole, self._object = [], "", None
        self._say(text, call.kind_of_rest)
        self._state = self._content

    def _drop(self) -> None:
        """Give up: no object follows the marker."""
        raw, self._pending = "".join(self._pending), []
        self._say(raw)
        self._state = self._content

    def _say(self, text: str, kind: Literal["content", "broken"] = "content") -> None:
        """Yield content, but hold back white space at its end."""
        shown = text.rstrip()
        if shown:
            self._pieces.append(Piece(kind, "".join(self._pending) + shown))
            self._pending = []
        if len(shown) < len(text):
            self._pending.append(text[len(shown) :])

    def _take(self, end: int, begin: int | None = None) -> None:
        """Read on, and keep what was read."""
        self._pending.append(self._text[self._at if begin is None else begin : end])
        self._at = end

    def _take_in(self, end: int) -> None:
        """Read on, and keep what was read with the object that is not settled."""
        self._whole += "".join(self._pending) + self._text[self._at : end]
        self._pending, self._at = [], end

    def _next(self) -> str | None:
        """Keep white space; return the character after it, or None if more text is needed."""
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        if space.end() > self._at:
            self._take(space.end())
        return self._text[self._at : self._at + 1] or None
