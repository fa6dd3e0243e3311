"""Reads one tool call in Qwen3-Coder's XML as it is written, and makes JSON of its parameters.

    f> ── <parameter= ──► key> ──► value ── </parameter> ──► ... ── </function>

Markers are literal: nothing in a value is markup but its end.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from octavo.server.parsing.call_body import CallBody
from octavo.server.parsing.pieces import partial_marker
from octavo.server.parsing.xml.types import as_json, schema_of, types_of

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^<>\n]{0,256}")
_TEXT = frozenset({"string"})


class XmlCall(CallBody):
    """What stands between <function= and </function>.

    Values are texts. One whose parameter's schema asks for a string stays as it is, without one line feed
    at each end, and is yielded as it comes; others are read as JSON when they have ended.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin before the function's name.

        Args:
            functions: schemas of arguments, by the names of functions.
        """
        super().__init__()
        self._functions = functions
        self._text, self._at = "", 0
        self._state: Callable[[], bool] = self._naming
        # Of the parameter under way.
        self._keys: set[str] = set()
        self._types: frozenset[str] | None = None
        self._value: list[str] = []
        self._is_first = True

    def feed(self, text: str, begin: int) -> int:
        """Read on from a position; return where the call ended or broke, or the text's end."""
        # What is left of the text before is short: a part of a name or of a marker.
        left = self._text[self._at :]
        self._text, self._at = (left + text[begin:], 0) if left else (text, begin)
        moved = begin - len(left) if left else 0
        while not (self.is_complete or self.is_broken) and self._state():
            pass
        end = self._at + moved if self.is_complete or self.is_broken else len(text)
        self._raw.append(text[begin:end])
        return end

    def _naming(self) -> bool:
        name = self._name()
        if name is not None:
            self.name, self.has_arguments = name, True
            self._arguments.append("{")
            self._state = self._between
        return name is not None

    def _between(self) -> bool:
        """Look for the next parameter or the end."""
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()
        if self._skips(PARAMETER):
            self._state = self._key
        elif self._skips(END_FUNCTION):
            self._arguments.append("}")
            self.is_complete = True
        else:
            rest = self._text[self._at : self._at + len(PARAMETER)]
            num_equal = max(_num_equal(rest, marker) for marker in (PARAMETER, END_FUNCTION))
            if num_equal == len(rest):
                return False
            self._break(self._at + num_equal)
        return True

    def _key(self) -> bool:
        key = self._name()
        if key is None:
            return False
        if key in self._keys:
            self.is_broken = True
        parameters = self._functions.get(self.name or "", {})
        self._types = types_of(schema_of(parameters, key), parameters)
        separator = ", " if self._keys else ""
        self._arguments.append(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        if self._types == _TEXT:
            self._arguments.append('"')
        self._keys.add(key)
        self._value, self._is_first = [], True
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        """Read a value; all but what may be its end is certain."""
        begin, at = self._at, self._text.find(END_PARAMETER, self._at)
        if at < 0:
            rest = self._text[begin:]
            held = max(partial_marker(rest, marker) for marker in (END_PARAMETER, "\n" + END_PARAMETER))
            self._at = len(self._text) - held
            self._take_value(self._text[begin : self._at])
            return False
        self._at = at + len(END_PARAMETER)
        value = self._text[begin:at]
        # A value that is one line feed alone is empty.
        self._take_value(value if self._is_first and value == "\n" else value.removesuffix("\n"))
        self._arguments.append('"' if self._types == _TEXT else as_json("".join(self._value), self._types))
        self._state = self._between
        return True

    def _take_value(self, text: str) -> None:
        if not text:
            return
        if self._is_first:
            text, self._is_first = text.removeprefix("\n"), False
        if self._types == _TEXT:
            self._arguments.append(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)

    def _name(self) -> str | None:
        """Take a name up to its bracket; None: more text is needed, or it is none."""
        found = _NAME.match(self._text, self._at)
        assert found is not None
        following = self._text[found.end() : found.end() + 1]
        if following == ">" and found[0]:
            self._at = found.end() + 1
            return found[0]
        if following:
            self._break(found.end())
        return None

    def _break(self, at: int) -> None:
        """Give up at a character; never later than when it comes, however the text is cut."""
        self.is_broken = True
        self._at = at + 1

    def _skips(self, marker: str) -> bool:
        """Return whether a marker follows, and read on after it."""
        is_here = self._text.startswith(marker, self._at)
        self._at += is_here * len(marker)
        return is_here


def _num_equal(text: str, marker: str) -> int:
    """Return how many characters at the beginning of both are equal."""
    pairs = zip(text, marker, strict=False)
    return next((number for number, (one, other) in enumerate(pairs) if one != other), len(text))
