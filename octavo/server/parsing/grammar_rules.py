"""Small rules in llguidance's dialect of Lark.

Names and schemas come from clients: they are inserted as JSON text, which no value can escape from.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.engine.structured.compiler import choice_regex
from octavo.engine.structured.schemas import strict_schema

ANY_TEXT = "/(?s:.*)/"
"""A terminal: any text, but no special token."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_JSON_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{1,40}"}
_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)
_SLASHES = {"/": r"\/", "\n": r"\n"}


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return a rule of a JSON value.

    Raises:
        StructuredOutputError: the schema cannot become a grammar.
    """
    return f"%json {json.dumps(strict_schema(schema, _JSON_OPTIONS), ensure_ascii=False)}"


def pattern_terminal(pattern: str) -> str:
    """Return a terminal that matches a whole text by a regular expression."""
    return f"/{_SLASH.sub(lambda found: _SLASHES.get(found[0], found[0]), pattern)}/"


def without(*literals: str) -> str:
    """Return a suffix for a terminal, so that its text contains none of these literals."""
    return "".join(f" & ~/(?s:.*){choice_regex([literal])}(?s:.*)/" for literal in literals)


def row(parts: Iterable[str]) -> str:
    """Return parts one after the other, without empty ones."""
    return " ".join(filter(None, parts))
