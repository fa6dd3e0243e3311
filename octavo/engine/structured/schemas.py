"""From a JSON schema as people write it to one that llguidance accepts, and enforces to the letter.

The new schema allows nothing that the old one forbids. It may allow less: nobody misses an integer of
twenty digits, and a pattern takes what all dialects of regular expressions agree on.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from octavo.engine.structured.facts import FactFinder
from octavo.engine.structured.keywords import check_keywords, with_known_keywords
from octavo.engine.structured.numbers import check_number, exact_bounds
from octavo.engine.structured.one_of import without_one_of
from octavo.engine.structured.patterns import translated
from octavo.errors import StructuredOutputError

FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)
"""Formats that are enforced. JSON Schema calls all formats annotations; any other is ignored."""
_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_SINGLE = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "then")
# Dialects differ in what these take. Where names depend on one, no name may be left to the others.
_DOUBTFUL = re.compile(r"\\[dwsDWS]|\(\?i|(?<!\\)\.")
# Without u: a name that is written in escapes would pass for another one.
_PLAIN_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}


def strict_schema(schema: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema for llguidance, with its options.

    Args:
        schema: of JSON values.
        options: of llguidance's compiler, such as whitespace_pattern.

    Raises:
        StructuredOutputError: it says what no grammar of llguidance enforces.
    """
    root = copy.deepcopy(dict(schema))
    finder = FactFinder(root)
    _walk(root, finder, check_keywords)
    _walk(root, finder, lambda part: without_one_of(part, finder))
    tightener = _Tightener()
    _walk(root, finder, tightener.tighten)
    return root | {"x-guidance": {**options, **(_PLAIN_ESCAPES if tightener.has_open_names else {})}}


def _walk(root: dict[str, Any], finder: FactFinder, change: Callable[[dict[str, Any]], object]) -> None:
    """Change every part of a schema in place, once, before the parts in it; errors say where it is."""
    waiting: list[tuple[str, Any]] = [("", root)]
    seen: set[int] = set()
    while waiting:
        place, part = waiting.pop()
        if isinstance(part, bool) or id(part) in seen:
            continue
        try:
            if not isinstance(part, dict):
                raise StructuredOutputError(f"expected a schema, an object or a boolean, got {part!r:.80}")
            seen.add(id(part))
            change(part)
        except StructuredOutputError as error:
            raise StructuredOutputError(f"{place.lstrip('.')}: {error}" if place else str(error)) from error
        waiting += ((place + where, found) for where, found in _parts(part))
        waiting.append((place + ".$ref", finder.referred(part.get("$ref"))))


def _parts(part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _MAPS:
        for key, found in part.get(name, {}).items():
            yield f".{name}.{key}", found
    for name in _LISTS:
        if isinstance(part.get(name), list):
            yield from ((f".{name}[{index}]", found) for index, found in enumerate(part[name]))
    for name in _SINGLE:
        if name in part and not isinstance(part[name], list):
            yield f".{name}", part[name]


class _Tightener:
    """Changes the parts of a schema so that llguidance enforces them.

    Attributes:
        has_open_names: somewhere, properties with and without a name stand side by side.
    """

    def __init__(self) -> None:
        self.has_open_names = False

    def tighten(self, part: dict[str, Any]) -> None:
        """Change one part in place.

        Raises:
            StructuredOutputError: llguidance cannot enforce it.
        """
        if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
            del part["format"]
        if isinstance(part.get("pattern"), str):
            part["pattern"] = translated(part["pattern"])
        _replace(part, with_known_keywords(exact_bounds(part)))
        for name in ("const", "enum"):
            for value in _scalars(part.get(name)):
                check_number(value, name)
        patterns = part.get("patternProperties")
        if isinstance(patterns, dict) and patterns:
            _translate_patterns(part, patterns)
        is_closed = part.get("additionalProperties") is False
        if not is_closed and any(part.get(name) for name in ("properties", "required", "patternProperties")):
            self.has_open_names = True
        _check_count(part, is_closed=is_closed and not patterns)


def _replace(part: dict[str, Any], new: Mapping[str, Any]) -> None:
    part.clear()
    part.update(new)


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _scalars(item)
    else:
        yield value


def _translate_patterns(part: dict[str, Any], patterns: Mapping[str, Any]) -> None:
    """Translate the patterns of names."""
    translations: dict[str, Any] = {}
    for pattern, value in patterns.items():
        new = translated(pattern)
        translations[new] = value if new not in translations else {"allOf": [translations[new], value]}
    part["patternProperties"] = translations
    if any(map(_DOUBTFUL.search, patterns)):
        part["additionalProperties"] = False


def _check_count(part: Mapping[str, Any], *, is_closed: bool) -> None:
    """Refuse a count of properties whose names a model chooses: it may write one name twice."""
    least, required = part.get("minProperties"), part.get("required")
    num_named = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > num_named + 1 and not is_closed:
        raise StructuredOutputError(
            f"minProperties: {least} cannot be held to, as a name may come twice; name properties in required"
        )
