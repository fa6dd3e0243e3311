r"""Rewrites a grammar of texts as one of the same texts within JSON strings: a line feed becomes \n.

    line: NAME LF             line: r_name r_lf
    NAME: /[^"]+/      ->     r_name: (/[[^"]&&[^"\\\x00-\x1f]]+/ | /(?:\\\\|\\n|...)/)+
    LF: "\n"                  r_lf: "\\n"

Before a tag that ends it, a text stands as it is, but each line feed, or "<", is a terminal of its own.

A lexer decides by the next byte where a terminal ends, and many escapes begin alike. So a terminal that may
hold escapes becomes a rule of single characters, in which only its last repetition is read in runs.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn

from octavo.errors import StructuredOutputError

_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*)|(?P<text>"(?:[^"\\\n]|\\.)*+"i?)|(?P<regex>/(?!/)(?:[^/\\\n]|\\.)++/[imslux]*)
    |(?P<import>%import\s+common\.\w+(?:\s*->\s*\w+)?)|(?P<open>"(?:[^"\\\n]|\\.)*+|/(?:[^/\\\n]|\\.)*+)
    |(?P<other>[^"/%]+|.)""",
    re.VERBOSE | re.DOTALL,
)
_PART = re.compile(
    r"""(?P<refused>\\[bB]|\(\?(?!P?<\w|[sm]*:))|(?P<open>\((?:\?(?:P?<\w+>|[sm]*:))?)|(?P<close>\))|(?P<repeat>(?:[*+?]|\{\d*+(?:,\d*+)?\})\??)|(?P<or>\|)
    |(?P<edge>\^|\$|\\[AzZ])
    |(?P<atom>\[\^?\]?(?:[^\]\\\[]|\\.|\[:\^?\w+:\])*\]|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.)""",
    re.VERBOSE | re.DOTALL,
)
_TERMINAL = re.compile(r"\b[A-Z][A-Z0-9_]*\b")


class _Writing(NamedTuple):
    """How a text is written where it stands: some characters by others, and a class of those that stay."""

    by: Mapping[str, str]
    plain: str


_JSON = _Writing(
    {character: json.dumps(character)[1:-1] for character in ['"', "\\", *map(chr, range(0x20))]},
    r'[^"\\\x00-\x1f]',
)
# llguidance's own terminals: those that hold such characters, and those that do not.
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
_HARMLESS = (
    "DIGIT HEXDIGIT INT SIGNED_INT DECIMAL FLOAT SIGNED_FLOAT NUMBER SIGNED_NUMBER LCASE_LETTER UCASE_LETTER "
    "LETTER WORD CNAME"
)


def tokens(source: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a grammar with their kinds: comment, text, regex, import, open, other."""
    for found in _TOKEN.finditer(source):
        yield found.lastgroup or "other", found[0]


def written(source: str, *, in_json: bool, end: str = "\n") -> str:
    """Return the grammar of the texts between the quotes of a JSON string, or else as they are before a tag.

    What ends the text then begins with `end`, a character that no run may swallow.

    Raises:
        StructuredOutputError: it has a part that cannot be rewritten.
    """
    writing = _JSON if in_json else _Writing({end: end}, f"[^{json.dumps(end)[1:-1]}]")
    return "".join(_rewritten(kind, text, writing) for kind, text in tokens(source))


def _rewritten(kind: str, text: str, writing: _Writing) -> str:
    if kind == "text":
        return _literal(text, writing)
    if kind == "regex":
        body, _, flags = text[1:].rpartition("/")
        return _regex(body.replace(r"\/", "/"), flags, writing)
    if kind == "import":
        name, _, alias = (part.strip() for part in text.partition("common.")[2].partition("->"))
        if name in _HARMLESS.split():
            return f"%import common.{name}\n{_rule(alias or name)}: {name}"
        if name in _COMMON:
            return f"{_rule(alias or name)}: {_regex(_COMMON[name], '', writing)}"
        _refuse(text)
    if kind == "open":
        _refuse(text)
    if kind == "comment":
        return ""
    if re.search(r"[%<&~]", text):
        _refuse(text)
    return _TERMINAL.sub(lambda found: _rule(found[0]), text)


def _rule(terminal: str) -> str:
    return f"r_{terminal.lower()}"


def _literal(text: str, writing: _Writing) -> str:
    body, _, flag = text.rpartition('"')
    try:
        inner: str = json.loads(f'{body}"')
    except ValueError as error:
        raise StructuredOutputError(f"the text {text[:80]} is malformed: {error}") from error
    outer = "".join(writing.by.get(character, character) for character in inner)
    if flag and outer != inner:
        _refuse(text)
    return json.dumps(outer, ensure_ascii=False) + flag


def _regex(pattern: str, flags: str, writing: _Writing) -> str:
    """Return a regular expression, or the same as a row of a rule if it may hold escapes."""
    parts = [(str(found.lastgroup), found[0]) for found in _PART.finditer(pattern)]
    dot_all = "s" in flags or any(kind == "open" and "s" in text.partition("?")[2] for kind, text in parts)
    atoms = [_atom(text, dot_all, writing) for kind, text in parts if kind == "atom"]
    if any(kind == "refused" for kind, _ in parts) or (any(held for _, held in atoms) and "i" in flags):
        _refuse(pattern)
    rest = iter(atoms)
    if not any(held for _, held in atoms):
        kept = "".join(next(rest)[0] if kind == "atom" else text for kind, text in parts)
        return f"/{_slashed(kept)}/{flags}"
    last = max(at for at, (kind, _) in enumerate(parts) if kind == "atom")
    is_run = parts[last + 1 : last + 2] != [] and parts[last + 1][1] in ("*", "+")
    row = []
    for at, (kind, text) in enumerate(parts):
        if kind == "atom":
            row.append(_characters(*next(rest), is_run=is_run and at == last))
        elif kind != "edge":
            row.append("(" if kind == "open" else text[:1] if text[0] in "*+?" else text)
    return f"({' '.join(row)})"


def _atom(atom: str, dot_all: bool, writing: _Writing) -> tuple[str, list[str]]:
    """Return what matches an atom's characters that stay, and what is written for the others."""
    if len(atom) == 1 and atom != ".":
        return ("", [writing.by[atom]]) if atom in writing.by else (re.escape(atom), [])
    characters = (r"[\s\S]" if dot_all else r"[^\n]") if atom == "." else atom
    try:
        held = [outer for one, outer in writing.by.items() if re.fullmatch(characters, one)]
    except re.error as error:
        raise StructuredOutputError(f"{atom[:80]} cannot be used in a custom tool's text: {error}") from error
    return f"[{characters}&&{writing.plain}]" if held or characters[:1] == "[" else characters, held


def _characters(plain: str, held: list[str], *, is_run: bool) -> str:
    escapes = "|".join(map(_escaped, held))
    if is_run and held:
        return f"(/{_slashed(plain)}+/ | /(?:{_slashed(escapes)})/)"
    return f"/(?:{_slashed('|'.join(filter(None, (plain, escapes))))})/"


def _escaped(text: str) -> str:
    return re.escape(text).replace("\\\n", r"\n")


def _slashed(pattern: str) -> str:
    return re.sub(r"(?<!\\)/", r"\/", pattern)


def _refuse(what: str) -> NoReturn:
    raise StructuredOutputError(f"{what.strip()[:80]!r} cannot be used in the grammar of a custom tool")
