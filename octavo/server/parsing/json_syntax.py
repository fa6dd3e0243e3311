"""Follows the structure of one JSON value as it is written, so that what cannot be one is known at once."""

import re

OUTSIDE = re.compile(r"[^-+.0-9A-Za-z \t\r\n]")
"""What ends a number or a name outside strings: JSON's marks, and whatever is not JSON's."""

_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
# The beginning of one.
_BEGUN = re.compile(
    r"-?|-?(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][-+]?[0-9]*)?"
    r"|t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?"
)
# Longer numbers are nothing that a reader takes.
_MAX_SCALAR_CHARS = 1024
_SPACE = " \t\r\n"
# Marks that may come next. A scalar may, too, where a value or an item may.
_VALUE, _ITEM, _KEY, _FIRST_KEY = '"{[', '"{[]', '"', '"}'
_OPENED = {"{": (_FIRST_KEY, "}"), "[": (_ITEM, "]")}


class JsonSyntax:
    """What may come next in a JSON value; strings' inner characters are not its concern."""

    def __init__(self, max_depth: int) -> None:
        """Begin before the value, which is at most so many objects and arrays deep."""
        self._max_depth = max_depth
        self._closers: list[str] = []
        # A number or a name under way, with one space after it if any follows.
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
            mark: the one after them, or nothing if there is no more text yet.
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
