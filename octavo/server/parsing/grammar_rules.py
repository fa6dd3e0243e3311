"""Small rules in llguidance's dialect of Lark.

Names and schemas come from strangers: they go in as JSON text, whose end no JSON value can fake.
"""

import json
import re
from collections.abc import Mapping
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
        StructuredOutputError: no grammar can be held to the schema.
    """
    return f"%json {json.dumps(strict_schema(schema, _JSON_OPTIONS), ensure_ascii=False)}"


def pattern_terminal(pattern: str) -> str:
    """Return a terminal of a regular expression that matches a whole text."""
    return f"/{_SLASH.sub(lambda found: _SLASHES.get(found[0], found[0]), pattern)}/"


def without(*literals: str) -> str:
    """Return what follows a terminal whose text must not hold any of these texts."""
    return "".join(f" & ~/(?s:.*){choice_regex([literal])}(?s:.*)/" for literal in literals)


def row(*parts: str) -> str:
    """Return parts one after the other; empty ones are nothing."""
    return " ".join(filter(None, parts))
