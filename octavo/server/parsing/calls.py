"""Readers of tool calls in the formats of Hermes, Gemma 4, Qwen3-Coder, Llama and Mistral."""

import secrets
import string
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from octavo.server.parsing.call_reader import CallReader
from octavo.server.parsing.gemma.gemma_call import GemmaCall
from octavo.server.parsing.json_call import CallObject
from octavo.server.parsing.piece import CallBody, Piece, marker_at
from octavo.server.parsing.xml_call import XmlCall
from octavo.server.parsing.xml_values import XmlTags

_ALPHANUMERIC = string.ascii_letters + string.digits


class HermesReader(CallReader):
    """<tool_call>{"name": "f", "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and 3."""

    def __init__(
        self, names: Set[str], markers: Sequence[str] = ("<tool_call>",), end: str = "</tool_call>"
    ) -> None:
        super().__init__(names, *markers)
        self._end = end
        self._is_closed = False

    def finish(self) -> list[Piece]:
        """Return what was held back, except a partial end marker."""
        is_closing = self._state == self._closing and not self._is_closed
        if is_closing and self._end.startswith(self._text[self._at :]):
            self._at = len(self._text)
        return super().finish()

    def _begin(self, call: CallBody) -> None:
        self._is_closed = False
        super()._begin(call)

    def _closing(self) -> bool:
        """Look for the end marker. A repeated one counts once."""
        if self._next() is None:
            return False
        ends = marker_at(self._text, self._at, (self._end,))
        if ends:
            self._at += len(ends)
            self._pending, self._is_closed = [], True
        elif ends is not None:
            self._state = self._content
        return ends is not None


class GemmaReader(HermesReader):
    """<|tool_call>call:f{a:1}<tool_call|>: Gemma 4."""

    begins = "call:"

    def __init__(self, names: Set[str]) -> None:
        super().__init__(names, ("<|tool_call>",), "<tool_call|>")

    def _new_object(self) -> GemmaCall:
        return GemmaCall()


class XmlReader(HermesReader):
    """<tool_call><function=f><parameter=a>1</parameter></function></tool_call>: Qwen3-Coder, and others.

    The model may forget <tool_call>, or one of the last two tags. After a broken call only <tool_call> begins
    another one: a function's tag may belong to the broken call. Calls without a function's tag have one end.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]], tags: XmlTags) -> None:
        super().__init__(functions.keys(), tags.begins, tags.end_call)
        self._functions, self._tags = functions, tags
        self._call: XmlCall | None = None

    def finish(self) -> list[Piece]:
        """Return what was held back; an unfinished call is judged by what was read of it."""
        if self._state == self._settling:
            call = self._call
            self._end_call(call is not None and not (self._tags.function and call.holds_tags))
        return super().finish()

    def _after_marker(self, marker: str) -> Callable[[], bool]:
        if marker == self._tags.call and self._tags.function:
            return self._opening
        self._begin_call(is_opened=marker == self._tags.call)
        return self._reading

    def _opening(self) -> bool:
        marker = None if self._next() is None else marker_at(self._text, self._at, self._tags.begins)
        if marker:
            self._take(self._at + len(marker))
        if marker == self._tags.function:
            self._begin_call(is_opened=True)
        elif marker is not None and not marker:
            self._drop()
        return marker is not None

    def _begin_call(self, *, is_opened: bool) -> None:
        self._call = XmlCall(self._functions, self._tags, is_opened=is_opened)
        self._begin(self._call)

    def _settling(self) -> bool:
        """Look for what shows whether the call is whole: inner tags must not follow it."""
        call, tags = self._call, self._tags
        if self._next() is None or call is None:
            return False
        found = marker_at(self._text, self._at, (tags.end_call, *tags.inner, *tags.begins))
        if found == tags.end_function and not (call.is_closed or self._has_extra):
            self._has_extra = True
            self._take_in(self._at + len(tags.end_function))
        elif found is not None:
            is_closed = call.is_opened and found == tags.end_call
            # Text is a sign of misplaced tags, too, if calls have two ends.
            is_misplaced = found in (("", *tags.inner) if tags.function else tags.inner)
            self._end_call(not is_misplaced and (is_closed or not call.holds_tags or not tags.function))
        return found is not None

    def _break(self) -> None:
        super()._break()
        self._look_for((self._tags.call,))

    def _drop(self) -> None:
        super()._drop()
        self._look_for((self._tags.call,))

    def _end_call(self, is_whole: bool) -> None:
        if is_whole:
            self._settle()
        else:
            self._break()


class LlamaReader(CallReader):
    """{"name": "f", "parameters": {...}} as the whole answer, or after <|python_tag|>: Llama 3.

    Several calls are separated by semicolons. Any other JSON is content: an object must name a known
    function.
    """

    def __init__(self, names: Set[str]) -> None:
        super().__init__(names, "<|python_tag|>")
        self._state = self._start

    def _start(self) -> bool:
        character = self._next()
        if character == "{":
            self._begin(self._new_object())
        elif character is not None:
            self._state = self._content
        return character is not None

    def _closing(self) -> bool:
        character = self._next()
        if character == ";":
            self._take(self._at + 1)
            self._state = self._opening
        elif character is not None:
            self._state = self._content
        return character is not None

    def _new_object(self) -> CallObject:
        return CallObject(known=self._names)


class MistralReader(CallReader):
    """[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...] or [TOOL_CALLS]f[ARGS]{...}: Mistral."""

    def __init__(self, names: Set[str]) -> None:
        super().__init__(names, "[TOOL_CALLS]")
        self._in_list = False
        self._name: list[str] = []

    @staticmethod
    def new_id() -> str:
        """Return an id as Mistral's chat templates demand it."""
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))

    def _opening(self) -> bool:
        if self._next() is None:
            return False
        marker = marker_at(self._text, self._at, self._markers)
        if marker:
            self._take(self._at + len(marker))
        elif marker is not None:
            self._in_list = self._text[self._at] == "["
            self._take(self._at + self._in_list)
            self._name = []
            self._state = self._item if self._in_list else self._naming
        return marker is not None

    def _item(self) -> bool:
        return super()._opening()

    def _ends_list(self, character: str) -> bool:
        return self._in_list and character == "]"

    def _naming(self) -> bool:
        """Read a name up to [ARGS], which the arguments follow; [CALL_ID] and an id may stand between."""
        is_cut, name = self._until_bracket()
        self._name.append(name)
        self._state = self._naming if is_cut else self._marking
        return not is_cut

    def _marking(self) -> bool:
        marker = marker_at(self._text, self._at, ("[ARGS]", "[CALL_ID]"))
        if marker:
            self._take(self._at + len(marker))
            self._state = self._bare if marker == "[ARGS]" else self._skipping_id
        elif marker is not None:
            self._drop()
        return marker is not None

    def _skipping_id(self) -> bool:
        is_cut, _ = self._until_bracket()
        self._state = self._skipping_id if is_cut else self._marking
        return not is_cut

    def _until_bracket(self) -> tuple[bool, str]:
        """Keep the text before a bracket; return whether there is no bracket yet, and the text."""
        end = self._text.find("[", self._at)
        text = self._text[self._at :] if end < 0 else self._text[self._at : end]
        self._take(self._at + len(text))
        return end < 0, text

    def _bare(self) -> bool:
        character, name = self._next(), "".join(self._name).strip()
        # This is a name only if a function has it: after a lost marker, anything may stand here.
        if character == "{" and name in self._names:
            self._begin(CallObject(name))
        elif character is not None:
            self._drop()
        return character is not None

    def _closing(self) -> bool:
        character = self._next() if self._in_list else ""
        if character == "]":
            self._at += 1
            self._pending = []
        if character is not None:
            self._state = self._content
        return character is not None
