"""Reads one tool call in the XML of Qwen3-Coder, GLM or MiniMax, and makes JSON of its parameters.

    f> ── <parameter= ──► key> ──► value ── </parameter> ──► ... ── </function>

Tags are literal: the only markup in a value is its end tag. A call whose tags are misplaced is no call,
unless only the last tag is missing; so no value ever contains another parameter.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.server.parsing.piece import CallBody, marker_at, partial_marker
from octavo.server.parsing.xml_values import ValueKind, XmlTags, holds_tags, lacks_its_end

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^<>\n]{0,256}")


class XmlCall(CallBody):
    """A call from a function's name to its end, as Qwen3-Coder's from <function= to </function>.

    Values are texts. A string parameter is streamed as is, minus the white space around it; others
    are read as JSON when they have ended.

    Attributes:
        is_opened: <tool_call> stands before it.
        is_closed: </tool_call> ended it, as </function> was left out.
        holds_tags: a value contains tags of calls, so none of the call's own may be missing.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]], tags: XmlTags, *, is_opened: bool) -> None:
        """Begin before the function's name.

        Args:
            functions: schemas of arguments, by the names of functions.
            tags: of calls.
            is_opened: <tool_call> stands before it.
        """
        super().__init__()
        self.is_opened = is_opened
        self.is_closed = self.holds_tags = False
        self._functions, self._tags = functions, tags
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
        name = self._name((self._tags.end_name,))
        # Without a tag of its own, a name is one only if a function has it.
        self.is_broken |= name is not None and not self._tags.function and name not in self._functions
        if name is not None and not self.is_broken:
            self.name, self.has_arguments = name, True
            self._arguments.append("{")
            self._state = self._between
        return name is not None

    def _between(self) -> bool:
        """Look for the next parameter or the end. The function's tag may be repeated there."""
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()
        tags = self._tags
        again = () if self._keys or not tags.function else (f"{tags.function}{self.name}{tags.end_name}",)
        closing = (tags.end_call,) if self.is_opened else ()
        found = marker_at(self._text, self._at, (tags.parameter, tags.end_function, *closing, *again))
        if found is None:
            return False
        self._at += len(found)
        if found == tags.parameter:
            self._state = self._naming_parameter
        elif found in (tags.end_function, tags.end_call):
            self._end(found)
        self.is_broken |= not found
        return True

    def _end(self, tag: str) -> None:
        self.is_closed = tag != self._tags.end_function
        self.is_broken = self.is_closed and self.holds_tags
        self._arguments.append("}")
        self.is_complete = not self.is_broken

    def _naming_parameter(self) -> bool:
        key = self._name(self._tags.end_keys)
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
        tag, around = self._tags.end_parameter, self._tags.around
        begin, at = self._at, self._text.find(tag, self._at)
        if at < 0:
            rest = self._text[begin:]
            num_pending = max(partial_marker(rest, marker) for marker in (tag, around + tag))
            self._at = len(self._text) - num_pending
            self._take_value(self._text[begin : self._at])
            return False
        self._at = at + len(tag)
        self._take_value(self._text[begin:at], is_last=True)
        self._end_value("".join(self._value))
        self._state = self._between
        return True

    def _end_value(self, value: str) -> None:
        text = value.removeprefix(self._tags.around).removesuffix(self._tags.around)
        written = '"' if self._kind.is_text else self._kind.as_json(text)
        self._arguments.append(written)
        # Valid JSON is complete. A string may mention tags only where strings are allowed.
        if written.startswith('"'):
            has_tags = holds_tags(value, self._tags)
            self.holds_tags |= has_tags
            is_misplaced = has_tags and not self._kind.may_be_text
            self.is_broken |= is_misplaced or lacks_its_end(value, self._key, self._keys, self._tags)

    def _take_value(self, text: str, *, is_last: bool = False) -> None:
        is_first = not self._value
        if text:
            self._value.append(text)
        if self._kind.is_text:
            text = text.removeprefix(self._tags.around) if is_first else text
            text = text.removesuffix(self._tags.around) if is_last else text
            self._arguments += [json.dumps(text, ensure_ascii=False)[1:-1]] if text else []

    def _name(self, ends: Sequence[str]) -> str | None:
        """Take a name up to its end tag; None if more text is needed, or if it is no name."""
        found = _NAME.match(self._text, self._at)
        assert found is not None
        end = found.end()
        if end == len(self._text):
            return None
        # A quote at the end may belong to the tag.
        end -= found[0].endswith('"') and ends[0].startswith('"')
        tag, name = marker_at(self._text, end, ends), self._text[self._at : end].strip()
        if tag is None:
            return None
        self._at = end + len(tag)
        self.is_broken = not name or (not tag and "" not in ends)
        return None if self.is_broken else name
