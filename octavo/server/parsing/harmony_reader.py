"""Divides an answer in harmony; see harmony.py.

Only tokens are markup. The same characters in ordinary tokens are text:

    token ids   [ <|channel|> ] [ anal ] [ ysis ] [ <|message|> ] [ 2+2 ]
    text         released by the engine, perhaps later: marks say where in it special tokens stand

Any order of tokens gives an answer. Text that belongs nowhere is content.
"""

import secrets
from collections import deque
from collections.abc import Sequence, Set
from typing import Literal

from octavo.server.parsing.call_reader import GOES_ON
from octavo.server.parsing.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
    Harmony,
    Header,
)
from octavo.server.parsing.json_call import CallObject
from octavo.server.parsing.piece import Piece


class HarmonyReader:
    """Divides one answer into reasoning, content and calls.

    Attributes:
        num_calls: complete ones so far.
    """

    def __init__(
        self,
        harmony: Harmony,
        *,
        names: Set[str],
        shows_reasoning: bool = True,
        channel: str | None = None,
    ) -> None:
        """Start at the beginning of an answer.

        Args:
            harmony: the model's special tokens.
            names: functions that may be called; none: calls are content.
            shows_reasoning: the channel of analysis is reasoning, not content.
            channel: that of the message the prompt left open, if any.
        """
        self.num_calls = 0
        self._pieces_of = harmony.pieces
        self._tokenizer = harmony.tokenizer
        self._decoder = self._tokenizer.incremental_decoder(skip_special_tokens=False)
        # Special tokens that were written: where their text begins and ends, and their pieces.
        self._marks: deque[tuple[int, int, str]] = deque()
        self._num_decoded = self._num_read = 0
        self._text, self._at = "", 0
        self._names = names
        self._shows_reasoning = shows_reasoning
        self._pieces: list[Piece] = []
        # State of the message that is being read; without a header, its body is being read.
        self._header: Header | None = Header()
        self._kind: Literal["reasoning", "content", "call", "settling"] = "content"
        self._call: CallObject | None = None
        # Text after the object of a call that is not settled yet.
        self._after: list[str] = []
        self._has_extra = False
        self._is_first = True
        self._said: set[str] = set()
        if channel is not None:
            self._open(channel, None)

    @staticmethod
    def new_id() -> str:
        """Return an id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Piece]:
        """Take the next characters and tokens of an answer; return what is certain by now.

        Args:
            text: what the engine has released. It may lag behind the tokens, and end before them.
            token_ids: all new tokens of the answer, special ones included.
        """
        self._note(token_ids)
        self._text, self._at = self._text[self._at :] + text, 0
        end = self._num_read + len(self._text)
        while self._marks and self._marks[0][1] <= end:
            begin, after, piece = self._marks.popleft()
            self._read(begin)
            self._skip(after)
            self._mark(piece)
        self._read(min(end, self._marks[0][0]) if self._marks else end)
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back when the answer has ended. A call that is not complete is content."""
        if self._marks and self._marks[0][0] == self._num_read:
            # This token ended the answer; the engine leaves out its text.
            self._mark(self._marks[0][2])
        self._end_message(is_whole=False)
        return self._pieces

    def _note(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._num_decoded += len(self._decoder.push([token_id]))
            if token_id in self._tokenizer.special_ids:
                begin = self._num_decoded - len(self._tokenizer.token_text(token_id))
                self._marks.append((begin, self._num_decoded, self._pieces_of.get(token_id, "")))

    def _read(self, end: int) -> None:
        """Read text up to a position in the answer."""
        text = self._text[self._at : self._at + end - self._num_read]
        self._skip(end)
        if not text:
            return
        if self._header is None:
            self._say(text)
        elif not self._header.add(text):
            text = self._header.text
            if text.lstrip().startswith("{"):
                # These are the misplaced arguments of a call that seemed empty: it is no call.
                self._call = None
            self._open("", None)
            self._say(text)

    def _skip(self, end: int) -> None:
        self._at += end - self._num_read
        self._num_read = end

    def _mark(self, piece: str) -> None:
        """Read a special token; one that cannot stand here is ignored."""
        if piece == MESSAGE:
            if self._header is not None:
                self._open(self._header.channel, self._header.function())
        elif piece in (END, RETURN, CALL):
            self._end_message(is_whole=True)
        elif piece == START or (piece == CHANNEL and self._header is None):
            self._end_message(is_whole=False)
            self._header = Header()
            self._header.mark(piece)
        elif piece in (CHANNEL, CONSTRAIN) and self._header is not None:
            self._header.mark(piece)

    def _open(self, channel: str, function: str | None) -> None:
        """Begin a message's body."""
        if self._call is not None:
            self._yield_call(self._call)
        self._header, self._call, self._is_first = None, None, True
        if function in self._names:
            self._kind, self._call = "call", CallObject(function)
        elif channel == "analysis" and self._shows_reasoning:
            self._kind = "reasoning"
        else:
            self._kind = "content"

    def _end_message(self, *, is_whole: bool) -> None:
        """End a message, or a header without one.

        Args:
            is_whole: the model ended it.
        """
        header, call = self._header, self._call
        if header is not None and not header.is_empty():
            text = header.text
            self._open("", None)
            self._say(text)
        elif call is not None and is_whole and not call.has_begun:
            # A call without arguments, unless they follow after the token, which is misplaced then.
            call.feed("{}", 0)
            self._header, self._kind = Header(), "settling"
            return
        elif call is not None and call.is_complete:
            self._yield_call(call)
        elif call is not None:
            self._give_up(call, call.raw)
        self._header, self._call = Header(), None

    def _say(self, text: str) -> None:
        """Read text of a message's body."""
        if self._kind == "call":
            self._read_call(text)
        elif self._kind == "settling":
            self._settle(text)
        else:
            # Messages of the same kind are separated by line feeds.
            separator = "\n" if self._is_first and self._kind in self._said else ""
            self._said.add(self._kind)
            self._is_first = False
            self._pieces.append(Piece(self._kind, separator + text))

    def _read_call(self, text: str) -> None:
        call = self._call
        assert call is not None
        begin = 0 if call.has_begun else len(text) - len(text.lstrip())
        if not call.has_begun and begin < len(text) and text[begin] != "{":
            self._kind, self._call = "content", None
            self._say(text[begin:])
            return
        at = call.feed(text, begin) if begin < len(text) else begin
        if call.is_broken:
            self._give_up(call, call.raw)
        elif call.is_complete:
            self._kind, self._after, self._has_extra = "settling", [], False
        else:
            self._pieces += call.news()
        if at < len(text):
            self._say(text[at:])

    def _settle(self, text: str) -> None:
        """Look for what shows whether a call's object was whole; one brace too many is dropped."""
        call = self._call
        assert call is not None
        for position, character in enumerate(text):
            if character == "}" and not self._has_extra:
                self._has_extra = True
            elif character in GOES_ON:
                self._give_up(call, call.raw + "".join(self._after) + text)
                return
            elif not character.isspace():
                self._yield_call(call)
                self._kind = "content"
                self._say(text[position:])
                return
        self._after.append(text)

    def _yield_call(self, call: CallObject) -> None:
        self._pieces += call.news()
        self.num_calls += 1
        self._call = None

    def _give_up(self, call: CallObject, text: str) -> None:
        """Yield the text of a broken call as content."""
        if text:
            self._pieces.append(Piece(call.kind_of_rest, text))
            self._said.add("content")
        self._kind, self._call, self._is_first = "content", None, False
