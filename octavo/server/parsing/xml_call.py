"""Reads one tool call in Qwen3-Coder's XML as it is written, and makes JSON of its parameters.

    f> ── <parameter= ──► key> ──► value ── </parameter> ──► ... ── </function>

Tags are literal: the only markup in a value is its end tag. A call whose tags are misplaced is no call,
unless only the last tag is missing; so no value ever contains another parameter.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from octavo.server.parsing.piece import CallBody, marker_at, partial_marker
from octavo.server.parsing.xml_values import (
    END_FUNCTION,
    END_PARAMETER,
    END_TOOL_CALL,
    FUNCTION,
    PARAMETER,
    ValueKind,
    holds_tags,
    lacks_its_end,
)

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^<>\n]{0,256}")


class XmlCall(CallBody):
    """A call from <function= to </function>.

    Values are texts. A string parameter is streamed as is, minus one leading and one trailing newline; others
    are read as JSON when they have ended.

    Attributes:
        is_opened: <tool_call> stands before it.
        is_closed: </tool_call> ended it, as </function> was left out.
        holds_tags: a value contains tags of calls, so none of the call's own may be missing.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]], *, is_opened: bool) -> None:
        """Begin before the function's name.

        Args:
            functions: schemas of arguments, by the names of functions.
            is_opened: <tool_call> stands before it.
        """
        super().__init__()
        self.is_opened = is_opened
        self.is_closed = self.holds_tags = False
        self._functions = functions
        self._text, self._at = "", 0
        self._state: Callable[[], bool] = self._naming
        # State of the parameter that is being read.
        self._key = ""
        self._keys: set[str] = set()
        self._kind = ValueKind(None, frozenset())
        self._value: list[str] = []

    def feed(self, text: str, begin: int) -> int:
        """Read on from a position; return where the call ended or broke, or where it needs more text."""
        self._text, self._at = text, begin
        while not (self.is_complete or self.is_broken) and self._state():
            pass
        self._raw.append(text[begin : self._at])
        return self._at

    def _naming(self) -> bool:
        name = self._name()
        if name is not None:
            self.name, self.has_arguments = name, True
            self._arguments.append("{")
            self._state = self._between
        return name is not None

    def _between(self) -> bool:
        """Look for the next parameter or the end. The function's tag may be repeated there."""
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()
        again = () if self._keys else (f"{FUNCTION}{self.name}>",)
        closing = (END_TOOL_CALL,) if self.is_opened else ()
        found = marker_at(self._text, self._at, (PARAMETER, END_FUNCTION, *closing, *again))
        if found is None:
            return False
        self._at += len(found)
        if found == PARAMETER:
            self._state = self._naming_parameter
        elif found in (END_FUNCTION, END_TOOL_CALL):
            self._end(found)
        self.is_broken |= not found
        return True

    def _end(self, tag: str) -> None:
        self.is_closed = tag == END_TOOL_CALL
        self.is_broken = self.is_closed and self.holds_tags
        self._arguments.append("}")
        self.is_complete = not self.is_broken

    def _naming_parameter(self) -> bool:
        key = self._name()
        if key is None:
            return False
        if key in self._keys:
            self.is_broken = True
        self._kind = ValueKind.of_parameter(self._functions.get(self.name or "", {}), key)
        separator = ", " if self._keys else ""
        self._arguments.append(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        if self._kind.is_text:
            self._arguments.append('"')
        self._keys.add(key)
        self._key, self._value = key, []
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        """Read a value, up to what may be its end tag."""
        begin, at = self._at, self._text.find(END_PARAMETER, self._at)
        if at < 0:
            rest = self._text[begin:]
            num_pending = max(
                partial_marker(rest, marker) for marker in (END_PARAMETER, "\n" + END_PARAMETER)
            )
            self._at = len(self._text) - num_pending
            self._take_value(self._text[begin : self._at])
            return False
        self._at = at + len(END_PARAMETER)
        self._take_value(self._text[begin:at], is_last=True)
        self._end_value("".join(self._value))
        self._state = self._between
        return True

    def _end_value(self, value: str) -> None:
        text = value.removeprefix("\n").removesuffix("\n")
        written = '"' if self._kind.is_text else self._kind.as_json(text)
        self._arguments.append(written)
        # Valid JSON is complete. A string may mention tags only where strings are allowed.
        if written.startswith('"'):
            has_tags = holds_tags(value)
            self.holds_tags |= has_tags
            is_misplaced = has_tags and not self._kind.may_be_text
            self.is_broken |= is_misplaced or lacks_its_end(value, self._key, self._keys)

    def _take_value(self, text: str, *, is_last: bool = False) -> None:
        is_first = not self._value
        if text:
            self._value.append(text)
        if self._kind.is_text:
            text = text.removeprefix("\n") if is_first else text
            text = text.removesuffix("\n") if is_last else text
            self._arguments += [json.dumps(text, ensure_ascii=False)[1:-1]] if text else []

    def _name(self) -> str | None:
        """Take a name up to its bracket; None if more text is needed, or if it is no name."""
        found = _NAME.match(self._text, self._at)
        assert found is not None
        following = self._text[found.end() : found.end() + 1]
        name = found[0].strip()
        if following:
            self._at = found.end()
            self.is_broken = following != ">" or not name
        if not following or self.is_broken:
            return None
        self._at += 1
        return name
