"""Follows the structure of one JSON value as it is written, so that what cannot be one is known at once."""

import re

OUTSIDE = re.compile(r"[^-+.0-9A-Za-z \t\r\n]")
"""What ends a number or a name outside strings: JSON's marks, and whatever is not JSON's."""

_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
# Marks that may come next. A scalar may, too, where a value or an item may.
_VALUE, _ITEM, _KEY, _FIRST_KEY = '"{[', '"{[]', '"', '"}'
_OPENED = {"{": (_FIRST_KEY, "}"), "[": (_ITEM, "]")}


class JsonSyntax:
    """What may come next in a JSON value; strings' inner characters are not its concern."""

    def __init__(self, max_depth: int) -> None:
        """Begin before the value, which is at most so many objects and arrays deep."""
        self._max_depth = max_depth
        self._closers: list[str] = []
        self._scalar: list[str] = []
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
            self._scalar.append(between)
        return not mark or (self._ends_scalar() and self._takes_mark(mark))

    def _ends_scalar(self) -> bool:
        scalar, self._scalar = "".join(self._scalar).strip(" \t\r\n"), []
        if not scalar:
            return True
        may_be = self._next in (_VALUE, _ITEM) and _SCALAR.fullmatch(scalar) is not None
        self._end_value()
        return may_be

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
