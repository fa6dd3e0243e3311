"""Readers of tool calls in the formats of Hermes, Qwen3-Coder, Llama and Mistral."""

import secrets
import string
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from octavo.server.parsing.call_object import CallObject
from octavo.server.parsing.call_reader import CallReader
from octavo.server.parsing.pieces import Piece
from octavo.server.parsing.xml.call import FUNCTION, XmlCall

_ALPHANUMERIC = string.ascii_letters + string.digits


class HermesReader(CallReader):
    """<tool_call>{"name": "f", "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and 3."""

    def __init__(
        self, names: Set[str], markers: Sequence[str] = ("<tool_call>",), end: str = "</tool_call>"
    ) -> None:
        super().__init__(names, *markers)
        self._end = end

    def finish(self) -> list[Piece]:
        """Return what was held back; a part of the end's marker is none of it."""
        if self._state == self._closing and self._end.startswith(self._text[self._at :]):
            self._at = len(self._text)
        return super().finish()

    def _closing(self) -> bool:
        if self._next() is None:
            return False
        ends = self._matches(self._end)
        if ends is None:
            return False
        if ends:
            self._at += len(self._end)
            self._held = []
        self._state = self._content
        return True


class XmlReader(HermesReader):
    """<tool_call><function=f><parameter=a>1</parameter></function></tool_call>: Qwen3-Coder.

    The model may forget <tool_call>.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(functions.keys(), ("<tool_call>", FUNCTION))
        self._functions = functions

    def _after_marker(self, marker: str) -> Callable[[], bool]:
        if marker != FUNCTION:
            return self._opening
        self._begin(XmlCall(self._functions))
        return self._reading

    def _opening(self) -> bool:
        begins = None if self._next() is None else self._matches(FUNCTION)
        if begins:
            self._take(self._at + len(FUNCTION))
            self._begin(XmlCall(self._functions))
        elif begins is False:
            self._drop()
        return begins is not None


class LlamaReader(CallReader):
    """{"name": "f", "parameters": {...}} as the whole answer, or after <|python_tag|>: Llama 3.

    Several are divided by semicolons. Any other JSON is content: an object must name a known function.
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
            self._state = self._start if character == "{" else self._content
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
        character = self._next()
        if character == "[":
            self._take(self._at + 1)
            self._in_list = True
            self._state = self._item
        elif character is not None:
            self._in_list = False
            self._name = []
            self._state = self._naming
        return character is not None

    def _item(self) -> bool:
        return super()._opening()

    def _naming(self) -> bool:
        """Read a name up to [ARGS], which the arguments follow; [CALL_ID] and an id may stand between."""
        is_cut, name = self._until_bracket()
        self._name.append(name)
        self._state = self._naming if is_cut else self._marking
        return not is_cut

    def _marking(self) -> bool:
        has_arguments, has_id = self._matches("[ARGS]"), self._matches("[CALL_ID]")
        if has_arguments:
            self._take(self._at + len("[ARGS]"))
            self._state = self._bare
        elif has_id:
            self._take(self._at + len("[CALL_ID]"))
            self._state = self._skipping_id
        elif has_arguments is False and has_id is False:
            self._drop()
        else:
            return False
        return True

    def _skipping_id(self) -> bool:
        is_cut, _ = self._until_bracket()
        self._state = self._skipping_id if is_cut else self._marking
        return not is_cut

    def _until_bracket(self) -> tuple[bool, str]:
        """Keep what stands before a bracket; return whether there is none yet, and the text."""
        end = self._text.find("[", self._at)
        text = self._text[self._at :] if end < 0 else self._text[self._at : end]
        self._take(self._at + len(text))
        return end < 0, text

    def _bare(self) -> bool:
        character, name = self._next(), "".join(self._name).strip()
        if character == "{" and name:
            self._begin(CallObject(name))
        elif character is not None:
            self._drop()
        return character is not None

    def _closing(self) -> bool:
        character = self._next() if self._in_list else ""
        if character == ",":
            self._take(self._at + 1)
            self._state = self._item
        elif character is not None:
            if character == "]":
                self._at += 1
                self._held = []
            self._state = self._content
        return character is not None
