"""Replaces keywords of a schema that llguidance does not know by equivalent ones that it knows."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from octavo.errors import StructuredOutputError

# Notes for readers, which llguidance does not know as such.
_NOTES = ("$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "contentSchema", "deprecated", "then", "else")
_REMARKS = ("$comment", "description", "title")
_IN_PLACE = ("$ref", "$dynamicRef", "allOf", "anyOf", "dependentSchemas", "if", "not", "oneOf")

_OBJECTS = (
    "$defs",
    "definitions",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "patternProperties",
    "properties",
)
_LISTS = ("allOf", "anyOf", "enum", "oneOf", "prefixItems", "required")
_NUMBERS = ("maximum", "minimum", "multipleOf")
_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def check_keywords(part: Mapping[str, Any]) -> None:
    """Check that the keywords of one schema have values of their types.

    Raises:
        StructuredOutputError: one has not.
    """
    for names, kind, what in (
        (_OBJECTS, dict, "an object"),
        (_LISTS, list, "a list"),
        (_NUMBERS, int | float, "a number"),
        (_COUNTS, int | float, "a count"),
        (("$ref", "format", "pattern"), str, "a string"),
    ):
        for name in names:
            if name in part and (not isinstance(part[name], kind) or isinstance(part[name], bool)):
                _refuse(name, what, part[name])
    for name in (*_NUMBERS, "exclusiveMaximum", "exclusiveMinimum"):
        if isinstance(part.get(name), float) and not math.isfinite(part[name]):
            _refuse(name, "a finite number", part[name])
    for name in part.get("required", ()):
        if not isinstance(name, str):
            _refuse("required", "names", name)
    types = part.get("type", "object")
    for name in (types or [types]) if isinstance(types, list) else [types]:
        if name not in _TYPES:
            _refuse("type", f"one of {', '.join(_TYPES)}, or a list of them", name)


def _refuse(name: str, what: str, value: object) -> None:
    raise StructuredOutputError(f"{name} must be {what}, got {value!r:.80}")


def with_known_keywords(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without keywords that say nothing here, and with others in place of some."""
    result = {name: value for name, value in part.items() if not _says_nothing(part, name, value)}
    if result.get("unevaluatedProperties") is False and not any(name in result for name in _IN_PLACE):
        del result["unevaluatedProperties"]
        result.setdefault("additionalProperties", False)
    _name_properties(result)
    more = list(_conditions(result))
    if more:
        result["allOf"] = [*result.get("allOf", ()), *more]
    return result


def _says_nothing(part: Mapping[str, Any], name: str, value: object) -> bool:
    if name == "uniqueItems":
        most = part.get("maxItems")
        return value is False or (isinstance(most, int) and most <= 1)
    if name in ("propertyNames", "unevaluatedItems", "unevaluatedProperties"):
        return value is True or value in ({}, {"type": "string"} if name == "propertyNames" else {})
    if name in ("dependencies", "dependentRequired", "dependentSchemas"):
        return value == {}
    if name == "if":
        return "then" not in part and "else" not in part
    return name in _NOTES and (name not in ("then", "else") or "if" not in part)


def _name_properties(result: dict[str, Any]) -> None:
    """Replace propertyNames by the names, or the pattern of names, that it allows."""
    names = result.get("propertyNames")
    if not isinstance(names, dict) or result.keys() & {"properties", "patternProperties", "required"}:
        return
    others = result.get("additionalProperties", True)
    kind = names.keys() - {"type", "description", "title"}
    if kind == {"pattern"} and isinstance(names["pattern"], str):
        result["patternProperties"] = {names["pattern"]: others}
    elif kind == {"enum"} and isinstance(names["enum"], list):
        result["properties"] = {name: others for name in names["enum"] if isinstance(name, str)}
    else:
        return
    result["additionalProperties"] = False
    del result["propertyNames"]


def _conditions(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Take out what depends on the presence of a property; yield it as choices."""
    for name in ("dependencies", "dependentRequired", "dependentSchemas"):
        depending = result.get(name)
        if isinstance(depending, dict):
            del result[name]
            for key, needed in depending.items():
                then = {"required": needed} if isinstance(needed, list) else needed
                yield {"anyOf": [_lacks(key), {"allOf": [{"required": [key]}, then]}]}
    if "not" in result and (negated := _negated(result["not"])) is not None:
        del result["not"]
        yield {"allOf": [negated]}


def _negated(schema: Any) -> dict[str, Any] | bool | None:
    """Return a schema of values that are not valid under another, perhaps not of all; None: none is found."""
    if not isinstance(schema, dict):
        return not schema
    result = {name: value for name, value in schema.items() if name not in _REMARKS}
    if "$ref" in result:
        return None
    if not result:
        return False
    if len(result) > 1:
        # What breaks one keyword breaks the schema.
        parts = [_negated({name: value}) for name, value in result.items()]
        found = [part for part in parts if part is not None]
        return {"anyOf": found} if found else None
    ((name, value),) = result.items()
    if name == "required":
        return {"type": "object", "anyOf": [_lacks(key) for key in value]}
    if name == "type":
        return _of_other_types({value} if isinstance(value, str) else set(value))
    if name in ("allOf", "anyOf"):
        parts = [_negated(part) for part in value]
        found = [part for part in parts if part is not None]
        other = "anyOf" if name == "allOf" else "allOf"
        return {other: found} if found and (name == "allOf" or len(found) == len(parts)) else None
    return None


def _of_other_types(types: set[str]) -> dict[str, Any] | bool:
    # Some numbers are integers.
    types |= {"integer", "number"} if "integer" in types else {"integer"}
    left = [kind for kind in _TYPES if kind not in types]
    return {"type": left} if left else False


def _lacks(key: str) -> dict[str, Any]:
    return {"properties": {key: False}}
