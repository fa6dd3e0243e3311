"""Which types a JSON schema allows, and a plain text as a JSON value of one of them."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_UNIONS = ("anyOf", "oneOf")
# Templates write Python's names of these.
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def schema_of(parameters: Mapping[str, Any], name: str) -> object:
    """Return the schema of one parameter. Those that no schema names are texts."""
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return parameters.get("additionalProperties") or {"type": "string"}


def types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the names of the types that a schema allows; None: any.

    Args:
        schema: of one value.
        root: what references begin at.
    """
    found: set[str] = set()
    seen: set[int] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if not isinstance(part, Mapping):
            return None
        unions = [part[key] for key in _UNIONS if isinstance(part.get(key), list)]
        if "type" in part:
            found.update(_strings(part["type"]))
        elif isinstance(part.get("enum"), list):
            found.update(kind_of(value) for value in part["enum"])
        elif "const" in part:
            found.add(kind_of(part["const"]))
        elif isinstance(part.get("$ref"), str):
            waiting.append(referred(part["$ref"], root))
        elif unions:
            waiting += [member for union in unions for member in union]
        else:
            return None
    return frozenset(found)


def referred(reference: str, root: Mapping[str, Any]) -> object:
    """Return what a local reference such as #/$defs/city points to; None: nothing that is there."""
    place: object = root
    for key in reference.removeprefix("#").split("/")[1:]:
        place = place.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place if reference.startswith("#") else None


def kind_of(value: object) -> str:
    """Return the name of a JSON value's type."""
    return _KINDS.get(type(value), "null")


def as_json(text: str, types: frozenset[str] | None) -> str:
    """Return a plain text as JSON: a number or an object if the types allow what it says, or a string.

    Args:
        text: as a model wrote it.
        types: names of types; None: any.
    """
    value = text.strip()
    value = _PYTHON.get(value, value)
    try:
        found = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = kind_of(found)
    is_allowed = types is None or kind in types or (kind == "integer" and "number" in types)
    is_allowed |= kind == "number" and types is not None and "integer" in types and found.is_integer()
    # Quotes of a string are the string's own.
    return value if is_allowed and kind != "string" else json.dumps(text, ensure_ascii=False)


def _strings(found: object) -> list[str]:
    return [name for name in (found if isinstance(found, list) else [found]) if isinstance(name, str)]
