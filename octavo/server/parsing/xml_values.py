"""Tags of calls, which types a JSON schema allows, and a plain text as a JSON value of one of them."""

import json
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.server.parsing.json_call import MAX_CALL_DEPTH


@dataclass(frozen=True, slots=True)
class XmlTags:
    """The tags of a model's calls.

    Attributes:
        call, end_call: around one call, or several.
        function, end_name: around a function's name; empty: it begins after `call`, and ends before white
            space or another tag.
        end_function: after a call; that of calls without `function` is end_call.
        parameter, end_keys: around a parameter's key; the second has variants.
        end_parameter: after a value.
        around: white space before and after a value, which is none of it.
        gap: a rule of what follows a name or a value.
    """

    call: str
    end_call: str
    function: str
    end_name: str
    end_function: str
    parameter: str
    end_keys: tuple[str, ...]
    end_parameter: str
    around: str = ""
    gap: str = '"\\n"'

    @property
    def begins(self) -> tuple[str, ...]:
        """The tags at which a call begins."""
        return (self.call, self.function) if self.function else (self.call,)

    @property
    def inner(self) -> tuple[str, ...]:
        """The tags inside a call."""
        return self.parameter, self.end_parameter, self.end_function

    def parameters_in(self, value: str) -> Iterator[re.Match[str]]:
        """Find tags of parameters in a text: whether a function's tag stands before, and the key."""
        begin, key = re.escape(self.function or self.call), r"[^<>\n]{1,256}?"
        ends = "|".join(map(re.escape, self.end_keys))
        pattern = rf"({begin}{key}{re.escape(self.end_name)}\s*)?{re.escape(self.parameter)}({key})(?:{ends})"
        return re.finditer(pattern, value)


_CALL = ("<tool_call>", "</tool_call>")
QWEN_TAGS = XmlTags(
    *_CALL, "<function=", ">", "</function>", "<parameter=", (">",), "</parameter>", around="\n"
)
GLM_TAGS = XmlTags(
    *_CALL, "", "", _CALL[1], "<arg_key>", ("</arg_key>\n<arg_value>", "</arg_key><arg_value>"),
    "</arg_value>", gap='"\\n"?',
)  # fmt: skip
MINIMAX_TAGS = XmlTags(
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '">', "</invoke>", '<parameter name="',
    ('">',), "</parameter>",
)  # fmt: skip

Types = frozenset[str]
"""Names of types. Where a number is allowed, an integer is."""

_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_UNIONS = ("anyOf", "oneOf")
# Schemas that references make deeper count as allowing anything.
_MAX_DEPTH = 64
# Templates write these by their Python names.
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def holds_tags(value: str, tags: XmlTags) -> bool:
    """Return whether a value holds tags that belong around parameters; they may be misplaced."""
    return any(tag in value for tag in (*tags.begins, tags.end_call, tags.end_function))


def lacks_its_end(value: str, key: str, keys: Set[str], tags: XmlTags) -> bool:
    """Return whether another parameter seems to begin within a value, so that the value's own end is missing.

    A text may mention a parameter that the call already has, as no call has one twice; but not at the place
    where a repeated tag would stand.

    Args:
        value: all that stands between the parameter's tags.
        key: the parameter.
        keys: all parameters of the call so far, this one included.
        tags: of calls.
    """
    for tag in tags.parameters_in(value):
        if tag[1] or tag[2].strip() not in keys:
            return True
        is_line = value.startswith("\n") and tag.start() == 1 and value.startswith("\n", tag.end())
        if tag[2].strip() == key and (tag.start() == 0 or is_line):
            return True
    return False


@dataclass(frozen=True, slots=True)
class ValueKind:
    """The types and strings that a parameter's schema allows.

    Attributes:
        types: the allowed ones; None: any.
        texts: strings that the schema lists.
    """

    types: Types | None
    texts: frozenset[str]

    @classmethod
    def of(cls, schema: object, root: Mapping[str, Any]) -> "ValueKind":
        """Return what a schema says; references begin at `root`."""
        return cls(types_of(schema, root), frozenset(_texts_of(schema, root)))

    @classmethod
    def of_parameter(cls, parameters: Mapping[str, Any], name: str) -> "ValueKind":
        """Return what the schema of all parameters says about one; one that it lacks is a string."""
        for part in _parts(parameters, parameters, ("allOf",)):
            properties = part.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                return cls.of(properties[name], parameters)
        return cls.of(parameters.get("additionalProperties") or {"type": "string"}, parameters)

    @property
    def is_text(self) -> bool:
        """Whether only strings are allowed."""
        return self.types == {"string"}

    @property
    def may_be_text(self) -> bool:
        """Whether strings are allowed."""
        return self.types is None or "string" in self.types

    def as_json(self, text: str) -> str:
        """Return a plain text as JSON; see the function `as_json`."""
        return json.dumps(text, ensure_ascii=False) if text in self.texts else as_json(text, self.types)


def types_of(schema: object, root: Mapping[str, Any]) -> Types | None:
    """Return the names of the types that a schema allows; None: any.

    Args:
        schema: that of one value.
        root: the schema at which references begin.
    """
    return _Types(root).of(schema)


class _Types:
    """Finds the types of schemas, each only once: many may refer to the same one, or to themselves."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._found: dict[int, Types | None] = {}
        self._depth = 0

    def of(self, schema: object) -> Types | None:
        """Return the types that all parts of a schema allow."""
        if not isinstance(schema, Mapping) or self._depth == _MAX_DEPTH:
            return None
        if id(schema) not in self._found:
            # A reference to itself adds nothing.
            self._found[id(schema)] = frozenset()
            self._depth += 1
            bounds = [types for types in self._bounds(schema) if types is not None]
            self._depth -= 1
            self._found[id(schema)] = frozenset.intersection(*bounds) if bounds else None
        return self._found[id(schema)]

    def _bounds(self, schema: Mapping[str, Any]) -> Iterator[Types | None]:
        """Yield the types that each part of a schema allows."""
        if "type" in schema:
            yield _with_integers(_strings(schema["type"]))
        for values in _listed(schema):
            yield _with_integers({kind_of(value) for value in values})
        if isinstance(schema.get("$ref"), str):
            yield self.of(referred(schema["$ref"], self._root))
        for union in _members(schema, _UNIONS):
            members = [self.of(member) for member in union]
            known = [types for types in members if types is not None]
            yield frozenset().union(*known) if len(known) == len(members) else None
        for parts in _members(schema, ("allOf",)):
            yield from map(self.of, parts)


def _texts_of(schema: object, root: Mapping[str, Any]) -> Iterator[str]:
    """Yield the strings that a schema names one by one."""
    for part in _parts(schema, root, (*_UNIONS, "allOf")):
        yield from (value for values in _listed(part) for value in values if isinstance(value, str))


def _parts(schema: object, root: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, what it refers to, and its members under these keys, each only once."""
    seen: set[int] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if id(part) in seen or not isinstance(part, Mapping):
            continue
        seen.add(id(part))
        yield part
        waiting += [member for members in _members(part, keys) for member in members]
        if isinstance(part.get("$ref"), str):
            waiting.append(referred(part["$ref"], root))


def referred(reference: str, root: Mapping[str, Any]) -> object:
    """Return what a local reference such as #/$defs/city points to; None if it points to nothing."""
    place: object = root
    for key in reference.removeprefix("#").split("/")[1:]:
        place = place.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place if reference.startswith("#") else None


def kind_of(value: object) -> str:
    """Return the name of a JSON value's type."""
    return _KINDS.get(type(value), "null")


def as_json(text: str, types: Types | None) -> str:
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
    is_allowed = types is None or kind in types
    is_allowed |= kind == "number" and types is not None and "integer" in types and found.is_integer()
    # A string in quotes keeps its quotes.
    is_taken = is_allowed and kind != "string" and not _is_deep(found)
    return value if is_taken else json.dumps(text, ensure_ascii=False)


def _is_deep(value: object) -> bool:
    """Return whether a value nests deeper than a call may."""
    level: list[Any] = [value]
    for _ in range(MAX_CALL_DEPTH):
        level = [
            entry
            for one in level
            if isinstance(one, list | dict)
            for entry in (one.values() if isinstance(one, dict) else one)
        ]
    return bool(level)


def _with_integers(types: Iterator[str] | set[str]) -> Types:
    found = frozenset(types)
    return found | {"integer"} if "number" in found else found


def _listed(schema: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Yield lists of the values that a schema names one by one."""
    if isinstance(schema.get("enum"), list):
        yield schema["enum"]
    if "const" in schema:
        yield [schema["const"]]


def _members(schema: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[list[Any]]:
    return (schema[key] for key in keys if isinstance(schema.get(key), list))


def _strings(found: object) -> Iterator[str]:
    return (name for name in (found if isinstance(found, list) else [found]) if isinstance(name, str))
