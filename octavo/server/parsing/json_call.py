"""Reads one tool call in JSON as it is written.

Two regular expressions of one character class each find what matters, and msgspec checks the whole at the
end. So the time is linear in the text, however it is cut. An object is given up as soon as it cannot become
JSON: what a stream has sent of it can then be completed to JSON, and a marker that follows is seen.
"""

import re
from collections.abc import Set
from typing import Any

import msgspec

from octavo.server.parsing.piece import CallBody
from octavo.tokenizer.messages import MAX_DEPTH

OUTSIDE = re.compile(r"[^-+.0-9A-Za-z \t\r\n]")
"""Matches what ends a number or a name outside strings: JSON's punctuation, and anything that is not JSON."""

_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
# The beginning of a scalar.
_BEGUN = re.compile(
    r"-?|-?(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][-+]?[0-9]*)?"
    r"|t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?"
)
# No reader takes longer numbers.
_MAX_SCALAR_CHARS = 1024
_SPACE = " \t\r\n"
# Punctuation that may come next. Where a value or an item may come, a scalar may come as well.
_VALUE, _ITEM, _KEY, _FIRST_KEY = '"{[', '"{[]', '"', '"}'
_OPENED = {"{": (_FIRST_KEY, "}"), "[": (_ITEM, "]")}
MAX_CALL_DEPTH = MAX_DEPTH - 4
"""Greatest depth of a call's object: its message, list and function come on top when it is sent back."""

# Control characters cannot stand in strings.
_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_ESCAPED = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})


class JsonSyntax:
    """Knows what may come next in a JSON value; it ignores the characters inside strings."""

    def __init__(self, max_depth: int) -> None:
        """Start before the value, which may nest at most `max_depth` objects and arrays."""
        self._max_depth = max_depth
        self._closers: list[str] = []
        # A number or a name that is being read, with one space after it if any follows.
        self._scalar = ""
        self._next = _VALUE

    @property
    def depth(self) -> int:
        """Objects and arrays that are open."""
        return len(self._closers)

    def takes(self, between: str, mark: str) -> bool:
        """Take text outside strings; return whether it may stand there.

        Args:
            between: characters that OUTSIDE does not match.
            mark: the punctuation after them, or empty if there is no more text yet.
        """
        if between:
            self._add(between)
        scalar = self._scalar.rstrip()
        if not scalar:
            return not mark or self._takes_mark(mark)
        has_ended = bool(mark) or len(scalar) < len(self._scalar)
        if self._next not in (_VALUE, _ITEM) or not _may_be_scalar(scalar, has_ended=has_ended):
            return False
        if mark:
            self._scalar = ""
            self._end_value()
        return not mark or self._takes_mark(mark)

    def _add(self, between: str) -> None:
        text = (self._scalar + between).lstrip(_SPACE)
        scalar = text.rstrip(_SPACE)
        self._scalar = scalar if len(scalar) == len(text) else f"{scalar} "

    def _takes_mark(self, mark: str) -> bool:
        if mark not in self._next:
            return False
        if mark in _OPENED:
            self._next, closer = _OPENED[mark]
            self._closers.append(closer)
        elif mark == '"' and self._next in (_KEY, _FIRST_KEY):
            self._next = ":"
        elif mark == ":":
            self._next = _VALUE
        elif mark == ",":
            self._next = _KEY if self._closers[-1] == "}" else _VALUE
        else:
            if mark != '"':
                self._closers.pop()
            self._end_value()
        return self.depth <= self._max_depth

    def _end_value(self) -> None:
        self._next = f",{self._closers[-1]}" if self._closers else ""


def _may_be_scalar(text: str, *, has_ended: bool) -> bool:
    return len(text) <= _MAX_SCALAR_CHARS and (_SCALAR if has_ended else _BEGUN).fullmatch(text) is not None


class CallObject(CallBody):
    """An object such as {"name": "f", "arguments": {...}}; or, if the name is known, {...} alone."""

    def __init__(self, name: str | None = None, *, known: Set[str] | None = None) -> None:
        """Begin before the opening brace.

        Args:
            name: the function's, if the object holds its arguments alone.
            known: names, of which a call must have one, with arguments. None: any name will do, and missing
                arguments are {}.
        """
        super().__init__(name)
        self._is_bare = name is not None
        self._known = known
        self._syntax = JsonSyntax(MAX_CALL_DEPTH)
        self._in_string = self._is_escaped = False
        self._num_hex = 0
        # State of the member that is being read.
        self._key: str | None = None
        self._keys: set[str] = set()
        self._string: list[str] | None = None
        self._in_arguments = False

    def feed(self, text: str, begin: int) -> int:
        """Read on from a position; return where the object ended or broke, or the text's end."""
        position = begin
        while position < len(text) and not (self.is_complete or self.is_broken):
            end, mark = self._look(text, position)
            if not self._fits(text[position : end - len(mark)], mark):
                self.is_broken = True
                end -= len(mark)
            self._raw.append(text[position:end])
            if not self.is_broken:
                self._keep(text[position:end], mark)
            position = end
        return position

    def _look(self, text: str, position: int) -> tuple[int, str]:
        """Return where the next mark ends, and the mark; the mark is empty if there is none."""
        if self._is_escaped or self._num_hex:
            return position + 1, text[position]
        found = (_IN_STRING if self._in_string else OUTSIDE).search(text, position)
        return (len(text), "") if found is None else (found.end(), found[0])

    def _fits(self, before: str, mark: str) -> bool:
        if self._num_hex:
            return mark in _HEX
        if self._is_escaped:
            return mark in _ESCAPED
        if self._in_string:
            return mark in ("", '"', "\\")
        return self._syntax.takes(before, mark)

    def _keep(self, part: str, mark: str) -> None:
        """Note a part of the object, which ends at a mark or at the end of the text so far."""
        if self._string is not None:
            self._string.append(part)
        was_in_arguments = self._in_arguments
        if self._num_hex:
            self._num_hex -= 1
        elif self._is_escaped:
            self._is_escaped = False
            self._num_hex = 4 * (mark == "u")
        elif self._in_string:
            self._is_escaped = mark == "\\"
            if mark == '"':
                self._end_string()
        elif mark:
            self._note(mark)
        if was_in_arguments:
            self._arguments.append(part if self._in_arguments else part[:-1])
        elif self._in_arguments:
            self._arguments.append("{")
        if self._syntax.depth == 0 and not self.is_broken:
            self._end()

    def _note(self, mark: str) -> None:
        """Follow the structure outside strings."""
        depth = self._syntax.depth
        if mark == '"':
            self._in_string = True
            if depth == 1 and not self._is_bare:
                self._string = ['"']
        elif mark in "{[":
            self._open(mark)
        elif mark in "}]" and depth == (0 if self._is_bare else 1):
            self._in_arguments = False
        elif depth == 1 and mark == ",":
            self._key = None

    def _open(self, mark: str) -> None:
        if self._is_bare:
            self.has_arguments = self._in_arguments = True
        elif self._syntax.depth == 2 and self._key in _ARGUMENTS:
            self.is_broken = mark == "["
            self.has_arguments = self._in_arguments = True

    def _end_string(self) -> None:
        self._in_string = False
        if self._string is None:
            return
        try:
            text = msgspec.json.decode("".join(self._string), type=str)
        except msgspec.DecodeError:
            self.is_broken = True
            return
        self._string = None
        if self._key is None:
            self._begin_member(text)
        elif self._key == "name":
            self.name = text
            self.is_broken |= self._known is not None and text not in self._known

    def _begin_member(self, key: str) -> None:
        kind = "arguments" if key in _ARGUMENTS else key
        self.is_broken |= key not in _KEYS or kind in self._keys
        self._keys.add(kind)
        self._key = key

    def _end(self) -> None:
        """Check the whole object."""
        try:
            found: dict[str, Any] = msgspec.json.decode(self.raw, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            self.is_broken = True
            return
        if not self._is_bare:
            arguments = [found[key] for key in _ARGUMENTS if key in found]
            self.is_broken |= not (isinstance(found.get("name"), str) and found["name"].strip())
            # Models write null when there is nothing to say.
            self.is_broken |= any(not isinstance(value, dict | None) for value in arguments)
            self.is_broken |= self._known is not None and not arguments
            if not self.has_arguments:
                self._arguments.append("{")
                self.has_arguments = True
        self._arguments.append("}")
        self.is_complete = not self.is_broken
