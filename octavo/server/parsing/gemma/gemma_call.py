"""Reads one call of Gemma 4, whose arguments are like JSON, and makes JSON of them as they are written.

    call:f{city:<|"|>Rome<|"|>,days:3,more:{list:[true,<|"|>a<|"|>]}}

Keys are bare, strings stand between two equal marks, and nothing in them is escaped.
"""

import json
import re
from collections.abc import Mapping

import msgspec

from octavo.server.parsing.json_call import CallObject
from octavo.server.parsing.piece import CallBody, Piece, marker_at, partial_marker

QUOTE = '<|"|>'
KEY = r"""[^\s{}\[\]<>:,"']{1,256}"""
"""A pattern of names and bare keys."""

_HEAD = re.compile(rf"call:({KEY})(\{{)?")
_MARK = re.compile(r"[{}\[\]:,<]")
_SEPARATORS = {":": ": ", ",": ", "}
_MAX_BARE_CHARS = 1024
# Chat templates write these by their Python names.
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def gemma_text(value: object) -> str:
    """Return a JSON value as Gemma 4's chat template writes it, with its keys in alphabetical order."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        pairs = (f"{key}:{gemma_text(value[key])}" for key in sorted(value, key=str.lower))
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma_text, value))}]"
    return json.dumps(value)


class GemmaCall(CallBody):
    """A call from "call:" to the brace that closes its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self._json: CallObject | None = None
        self._in_string = False
        self._text, self._at = "", 0

    def feed(self, text: str, begin: int) -> int:
        """Read on from a position; return where the call ended or broke, or where it needs more text."""
        self._text, self._at = text, begin
        while not (self.is_complete or self.is_broken) and self._step():
            pass
        self._raw.append(text[begin : self._at])
        return self._at

    def news(self) -> list[Piece]:
        """Return what is new in a call that is not broken."""
        pieces = [] if self._json is None else self._json.news()
        self._is_announced |= bool(pieces)
        return pieces

    def _step(self) -> bool:
        """Read one part; return False if more text is needed."""
        if self._json is None:
            return self._naming()
        return self._string() if self._in_string else self._between()

    def _naming(self) -> bool:
        found = _HEAD.match(self._text, self._at)
        is_cut = (
            len(self._text) == self._at + len("call:") if found is None else found.end() == len(self._text)
        )
        if found is not None and found[2]:
            self._json = CallObject(found[1])
            self._at = found.end()
            self._add("{")
        elif is_cut:
            return False
        else:
            self.is_broken = True
        return True

    def _string(self) -> bool:
        end = self._text.find(QUOTE, self._at)
        cut = end if end >= 0 else len(self._text) - partial_marker(self._text[self._at :], QUOTE)
        self._add(json.dumps(self._text[self._at : cut], ensure_ascii=False)[1:-1])
        self._at = cut
        if end >= 0:
            self._quote()
        return end >= 0

    def _quote(self) -> None:
        self._add('"')
        self._at += len(QUOTE)
        self._in_string = not self._in_string

    def _between(self) -> bool:
        """Read punctuation outside strings, and the bare text before it."""
        found = _MARK.search(self._text, self._at)
        end = len(self._text) if found is None else found.start()
        bare = self._text[self._at : end].strip()
        mark = None if found is None else found[0]
        if mark == "<":
            mark = marker_at(self._text, end, (QUOTE,))
        if len(bare) > _MAX_BARE_CHARS or (bare and mark in ("{", "[", QUOTE)) or mark == "":
            self.is_broken = True
        elif mark == QUOTE:
            self._at = end
            self._quote()
        elif mark is not None:
            self._at = end + 1
            self._bare(bare, mark)
        return mark is not None

    def _bare(self, bare: str, mark: str) -> None:
        written = _as_json(bare, is_key=mark == ":") if bare else ""
        if written is None:
            self.is_broken = True
        else:
            self._add(written + _SEPARATORS.get(mark, mark))

    def _add(self, written: str) -> None:
        assert self._json is not None
        self._json.feed(written, 0)
        self.is_complete, self.is_broken = self._json.is_complete, self._json.is_broken


def _as_json(bare: str, *, is_key: bool) -> str | None:
    """Return bare text as JSON; None: a quote in it shows that it is only a part of a string."""
    if bare.startswith('"') or not is_key:
        bare = _PYTHON.get(bare, bare)
        try:
            msgspec.json.decode(bare)
        except msgspec.DecodeError:
            return None if '"' in bare else json.dumps(bare, ensure_ascii=False)
        return bare
    return None if '"' in bare else json.dumps(bare, ensure_ascii=False)
