"""From JSON Schema's regular expressions (ECMA-262) to those of Rust's regex crate, which llguidance reads.

Dialects differ in what a class such as `\\S` holds: the translation takes what all of them hold, so that
whatever validates an output finds it right. It never takes NUL: llguidance lets a class of all control
characters take `"` and `\\` too, if it stands inside a JSON string.
"""

import re

from octavo.errors import StructuredOutputError

_DIGITS, _WORD, _SPACE = r"0-9", r"0-9A-Za-z_", r"\x{9}-\x{d}\x{20}"
# What some dialect takes for a digit, a letter of a word, a space.
_ANY_DIGITS, _ANY_WORD = r"\p{Nd}", r"\p{L}\p{N}\p{M}\p{Pc}_"
_ANY_SPACE = r"\s\x{1c}-\x{1f}\x{85}\x{feff}"
_KINDS = {"d": (_DIGITS, _ANY_DIGITS), "w": (_WORD, _ANY_WORD), "s": (_SPACE, _ANY_SPACE)}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_NOTHING = r"[^\s\S]"
_ANY_BUT_LINES = r"[^\x{a}\x{d}\x{2028}\x{2029}]"

_COUNT = re.compile(r"\{\d+(?:,\d*)?\}")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|c([A-Za-z])")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_=]{1,64}\}")
_GROUP = re.compile(r"\((?:\?(?::|P?<[A-Za-z_]\w*>))?(?!\?)")


def translated(pattern: str) -> str:
    """Return a pattern of JSON Schema for llguidance; it takes no text that the original does not.

    Raises:
        StructuredOutputError: it has what cannot be translated, such as look-around.
    """
    return _Translator(pattern).run()


class _Translator:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def run(self) -> str:
        parts = []
        ignores_case = self._pattern.startswith("(?i)")
        if ignores_case:
            self._at = 4
        while self._at < len(self._pattern):
            parts.append(self._next())
        return ("(?i)" if ignores_case else "") + "".join(parts)

    def _next(self) -> str:
        """Return the next piece, translated."""
        character = self._take()
        if character == "\\":
            return self._escape()
        if character == "[":
            return self._class()
        if character == "(":
            return self._group()
        if character in "*+?{":
            return self._quantifier()
        if character in "^$|)":
            return character
        return _ANY_BUT_LINES if character == "." else _literal(ord(character))

    def _take(self) -> str:
        if self._at == len(self._pattern):
            self._refuse("is cut off")
        self._at += 1
        return self._pattern[self._at - 1]

    def _taken(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        found = expression.match(self._pattern, self._at)
        self._at = self._at if found is None else found.end()
        return found

    def _group(self) -> str:
        self._at -= 1
        if self._taken(_GROUP) is None:
            self._refuse("has look-around or a flag")
        return "(?:"

    def _quantifier(self) -> str:
        self._at -= 1
        counted = self._taken(_COUNT)
        if counted is None and self._take() == "{":
            if re.match(r",\d*\}", self._pattern[self._at :]):
                self._refuse("has a count without its first number, which dialects read differently")
            return _literal(ord("{"))
        found = self._pattern[self._at - 1] if counted is None else counted[0]
        if self._pattern[self._at : self._at + 1] == "+":
            self._refuse("has a possessive quantifier")
        return found

    def _escape(self) -> str:
        """Return what an escape outside of a class means."""
        character = self._pattern[self._at : self._at + 1]
        if character.lower() in _KINDS and character:
            self._at += 1
            narrow, wide = _KINDS[character.lower()]
            return f"[{narrow}]" if character.islower() else f"[^{wide}]"
        found = self._taken(_PROPERTY)
        if found is not None:
            return f"\\{found[0]}"
        code = self._code()
        return _literal(code) if code else _NOTHING

    def _code(self) -> int:
        """Return the code point of an escaped character."""
        found = self._taken(_HEX)
        if found is not None:
            code = ord(found[3]) % 32 if found[3] else int(found[1] or found[2], 16)
            if 0xD800 <= code <= 0xDFFF:
                self._refuse("has a surrogate; write the character itself")
            return code
        character = self._take()
        if character == "0" and not self._pattern[self._at : self._at + 1].isdecimal():
            return 0
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character.isalnum():
            self._refuse(f"has \\{character}, which is not supported or means different things")
        return ord(character)

    def _class(self) -> str:
        is_negated = self._pattern[self._at : self._at + 1] == "^"
        self._at += is_negated
        if self._pattern[self._at : self._at + 1] == "]":
            self._refuse("has a class that begins with ], which dialects read differently; write \\]")
        items = []
        while (item := self._item(is_negated=is_negated)) is not None:
            items.append(item)
        if is_negated:
            return f"[^{''.join(items)}\\x{{0}}]"
        found = "".join(items)
        return f"[{found}]" if found else _NOTHING

    def _item(self, *, is_negated: bool) -> str | None:
        """Return the next part of a class; None: it ends here."""
        first = self._atom(is_negated=is_negated)
        if first is None or isinstance(first, str):
            return first
        begin = self._at
        if self._pattern[begin : begin + 1] != "-" or self._pattern[begin + 1 : begin + 2] in ("]", ""):
            return _literal(first) if first else ""
        self._at += 1
        last = self._atom(is_negated=is_negated)
        if isinstance(last, str):
            return f"{_literal(first) if first else ''}\\x{{2d}}{last}"
        assert last is not None
        if last < first:
            self._refuse("has a range that ends before it begins")
        return f"{_literal(max(first, 1))}-{_literal(last)}" if last else ""

    def _atom(self, *, is_negated: bool) -> str | int | None:
        """Return a class's next character, or several as text for a class; None: the class ends."""
        character = self._take()
        if character == "]":
            return None
        if character != "\\":
            return ord(character)
        kind = self._pattern[self._at : self._at + 1]
        if kind and kind.lower() in _KINDS:
            self._at += 1
            narrow, wide = _KINDS[kind.lower()]
            # A class that is taken away stands for what any dialect holds.
            if kind.islower():
                return wide if is_negated else narrow
            return f"[^{narrow if is_negated else wide}]"
        found = self._taken(_PROPERTY)
        if found is not None:
            return f"\\{found[0]}"
        if kind == "b":
            self._at += 1
            return 8
        return self._code()

    def _refuse(self, why: str) -> None:
        raise StructuredOutputError(f"the pattern {self._pattern[:200]!r} cannot be held to: it {why}")


def _literal(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"
