"""Reads one tool call in JSON as it is written.

Two regular expressions of one character class each find what matters, and msgspec checks the whole at the
end. So the time is linear in the text, however it is cut. An object that cannot become JSON is given up at
once, so that what a stream told of it can be completed to JSON, and a marker that follows is seen.
"""

import re
from collections.abc import Set
from typing import Any

import msgspec

from octavo.server.parsing.call_body import CallBody
from octavo.server.parsing.json_syntax import OUTSIDE, JsonSyntax
from octavo.tokenizer.messages import MAX_DEPTH

MAX_CALL_DEPTH = MAX_DEPTH - 4
"""How deep a call's object may nest: its message, list and function come on top when it is sent back."""

# Control characters cannot stand in strings.
_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_ESCAPED = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})


class CallObject(CallBody):
    """An object such as {"name": "f", "arguments": {...}}; or, if the name is known, {...} alone."""

    def __init__(self, name: str | None = None, *, known: Set[str] | None = None) -> None:
        """Begin before the opening brace.

        Args:
            name: the function's, if the object holds its arguments alone.
            known: it is a call only if it has arguments and one of these names. None: any name will do, and
                arguments that are left out are {}.
        """
        super().__init__(name)
        self._is_bare = name is not None
        self._known = known
        self._syntax = JsonSyntax(MAX_CALL_DEPTH)
        self._in_string = self._is_escaped = False
        self._num_hex = 0
        # These belong to the member under way.
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
        """Return where the next mark ends, and the mark; it is nothing where there is none."""
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
            # Models write null where there is nothing to say.
            self.is_broken |= any(not isinstance(value, dict | None) for value in arguments)
            self.is_broken |= self._known is not None and not arguments
            if not self.has_arguments:
                self._arguments.append("{")
                self.has_arguments = True
        self._arguments.append("}")
        self.is_complete = not self.is_broken
