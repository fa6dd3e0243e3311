"""What must hold of every value that a JSON schema allows, as far as it is easily seen.

Facts may be fewer than the schema says, never more: two schemas are disjoint only if their facts prove it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_MAX_DEPTH = 8
# A stranger's schema may cost this many looks; afterwards nothing more is proved.
_MAX_LOOKS = 20_000
_RANGES = (
    ("number", "minimum", "maximum"),
    ("number", "exclusiveMinimum", "exclusiveMaximum"),
    ("string", "minLength", "maxLength"),
    ("array", "minItems", "maxItems"),
    ("object", "minProperties", "maxProperties"),
)
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07")


# A number, and 1 or -1 if the range begins above or ends below it.
Bound = tuple[float, int]
_EVERYWHERE: tuple[Bound, Bound] = ((-math.inf, 0), (math.inf, 0))


@dataclass(slots=True)
class Facts:
    """Facts about the values of one schema.

    Attributes:
        types: that they may have; an integer is a number.
        values: all that they may be; None: unknown.
        known: these values' identities.
        required: keys that objects have.
        properties: of objects, schemas that hold for a key.
        closed: of each closed schema, the keys that its objects may have.
        ranges: by type, least and most of the number, or of the length, as bounds.
        choices: of each list, one schema holds.
    """

    types: frozenset[str] = TYPES
    values: list[Any] | None = None
    known: set[Any] = field(default_factory=set)
    required: set[str] = field(default_factory=set)
    properties: dict[str, list[Any]] = field(default_factory=dict)
    closed: list[frozenset[str]] = field(default_factory=list)
    ranges: dict[str, tuple[Bound, Bound]] = field(default_factory=dict)
    choices: list[list[Any]] = field(default_factory=list)

    def of(self, key: str) -> list[Any]:
        """Return the schemas that hold for a key of an object."""
        is_closed = any(key not in names for names in self.closed)
        return [False] if is_closed else self.properties.get(key, [])


class FactFinder:
    """Finds facts about the parts of one schema, and what they exclude."""

    def __init__(self, root: object) -> None:
        self._root = root
        dialect = str(root.get("$schema")) if isinstance(root, Mapping) else ""
        # In these drafts, nothing beside a reference counts.
        self._refers_alone = any(draft in dialect for draft in _OLD_DRAFTS)
        self._looks = 0

    def facts(self, schemas: Iterable[Any]) -> Facts:
        """Return the facts about values that are valid under all of some schemas."""
        found = Facts()
        for schema in schemas:
            self._add(found, schema, 0)
        return found

    def are_disjoint(self, one: Facts, other: Facts, depth: int = 0) -> bool:
        """Return whether no value is of both, for certain."""
        self._looks += 1
        if depth > _MAX_DEPTH or self._looks > _MAX_LOOKS:
            return False
        for own, others in ((one, other), (other, one)):
            if own.values is not None and not any(self.may_be(v, others, depth) for v in own.values):
                return True
            for choice in own.choices:
                if all(self.are_disjoint(self.facts([part]), others, depth + 1) for part in choice):
                    return True
        return all(self._are_disjoint_as(kind, one, other, depth) for kind in one.types & other.types)

    def may_be(self, value: Any, facts: Facts, depth: int = 0) -> bool:
        """Return whether facts allow a value."""
        self._looks += 1
        if depth > _MAX_DEPTH or self._looks > _MAX_LOOKS:
            return True
        kind = type_of(value)
        if kind not in facts.types or (facts.values is not None and identity(value) not in facts.known):
            return False
        least, most = facts.ranges.get(kind, _EVERYWHERE)
        size = value if kind == "number" else len(value) if kind in ("string", "array", "object") else 0
        if not least <= (size, 0) <= most:
            return False
        if kind == "object":
            if not facts.required <= value.keys():
                return False
            for key, item in value.items():
                if not self.may_be(item, self.facts(facts.of(key)), depth + 1):
                    return False
        return all(
            any(self.may_be(value, self.facts([part]), depth + 1) for part in choice)
            for choice in facts.choices
        )

    def referred(self, reference: object) -> Any:
        """Return what a reference within the schema points to; True, which says nothing, if unseen."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return True
        found = self._root
        for part in reference[1:].split("/")[1:] if reference != "#" else []:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                return True
        return found if reference == "#" or reference.startswith("#/") else True

    def _are_disjoint_as(self, kind: str, one: Facts, other: Facts, depth: int) -> bool:
        lows, highs = zip(*(facts.ranges.get(kind, _EVERYWHERE) for facts in (one, other)), strict=True)
        if max(lows) > min(highs):
            return True
        return kind == "object" and any(
            self.are_disjoint(self.facts(one.of(key)), self.facts(other.of(key)), depth + 1)
            for key in sorted(one.required | other.required)
        )

    def _add(self, found: Facts, schema: object, depth: int) -> None:
        """Add what one more schema says."""
        if schema is False:
            found.types = frozenset()
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._looks > _MAX_LOOKS:
            return
        self._looks += 1 + len(schema.get("properties", ())) + len(schema.get("required", ()))
        if "$ref" in schema:
            self._add(found, self.referred(schema["$ref"]), depth + 1)
            if self._refers_alone:
                return
        found.types &= _types(schema.get("type"))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            found.values = [v for v in values if found.values is None or identity(v) in found.known]
            found.known = {identity(value) for value in found.values}
        _add_object(found, schema)
        for kind, low, high in _RANGES:
            least, most = found.ranges.get(kind, _EVERYWHERE)
            step = 1 if low.startswith("exclusive") else 0
            bounds = (
                (_number(schema.get(low), -math.inf), step),
                (_number(schema.get(high), math.inf), -step),
            )
            found.ranges[kind] = (max(least, bounds[0]), min(most, bounds[1]))
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                found.choices.append(schema[name])
        refused = schema.get("not")
        if isinstance(refused, Mapping) and refused.keys() == {"required"}:
            lacking = [{"type": "object", "properties": {str(key): False}} for key in refused["required"]]
            found.choices.append(lacking)
        for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            self._add(found, part, depth + 1)


def type_of(value: object) -> str:
    """Return the JSON type of a value; an integer is a number."""
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def identity(value: Any) -> Any:
    """Return what two JSON values share if they are equal, and only then; it can be hashed. True is not 1."""
    if isinstance(value, list):
        return ("array", *map(identity, value))
    if isinstance(value, dict):
        return ("object", frozenset((key, identity(item)) for key, item in value.items()))
    return (type_of(value), value)


def _types(value: object) -> frozenset[str]:
    if value is None:
        return TYPES
    names = value if isinstance(value, list) else [value]
    return frozenset("number" if name == "integer" else str(name) for name in names)


def _number(value: object, otherwise: float) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else otherwise


def _add_object(found: Facts, schema: Mapping[str, Any]) -> None:
    required, properties = schema.get("required"), schema.get("properties")
    if isinstance(required, list):
        found.required |= {key for key in required if isinstance(key, str)}
    known = properties if isinstance(properties, Mapping) else {}
    for key, part in known.items():
        found.properties.setdefault(key, []).append(part)
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        found.closed.append(frozenset(known))
