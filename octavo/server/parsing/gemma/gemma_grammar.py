"""Rules for the arguments of a call of Gemma 4: what a schema allows, as its chat template would write it."""

import json
import re
from collections.abc import Mapping
from typing import Any

from octavo.server.parsing.custom.text_tool import INPUT, TextParameters, lark_text
from octavo.server.parsing.gemma.gemma_call import KEY, QUOTE, gemma_text
from octavo.server.parsing.grammar_rules import ANY_OBJECT, ANY_TEXT, json_rule, row, without
from octavo.server.parsing.xml_grammar import SAYS_NOTHING, check_keywords, refuse, text_bounds, typed
from octavo.server.parsing.xml_values import kind_of, referred, types_of

_SCALARS = frozenset({"integer", "number", "boolean", "null"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_TYPES = {
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "boolean": frozenset[str](),
    "null": frozenset[str](),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"$defs", "additionalProperties", "definitions", "properties", "required"}),
}
_ANYTHING: Mapping[str, Any] = {"type": ["string", "number", "boolean", "null", "array", "object"]}


def gemma_rules(rule: str, schema: Mapping[str, Any] | None, quote: str) -> list[str]:
    """Return rules of a call's arguments, whose keys come in alphabetical order, as in chat templates.

    Args:
        rule: the name of the first rule.
        schema: that of the arguments; None: any object.
        quote: a rule of the mark around strings, which may be a special token.

    Raises:
        StructuredOutputError: the schema says what cannot be written as a grammar.
    """
    if isinstance(schema, TextParameters) and schema.lark is not None:
        text = lark_text(f"{rule}_text", schema.lark, in_json=False, end=QUOTE[0])
        return [f'{rule}: "{{{INPUT}:" {quote} {rule}_text {quote} "}}"', text]
    rules = _Rules(rule, schema or ANY_OBJECT, quote)
    first = rules.of({"type": "object", **(schema or ANY_OBJECT)})
    return [f"{rule}: {first}", *rules.written]


class _Rules:
    """Writes a rule for each schema, only once: many may refer to the same one, or to themselves."""

    def __init__(self, rule: str, root: Mapping[str, Any], quote: str) -> None:
        self._rule, self._root, self._quote = rule, root, quote
        self.written: list[str] = []
        # The schemas are kept, so that no other one gets the id of one that is gone.
        self._names: dict[int, tuple[str, object]] = {}

    def of(self, schema: object) -> str:
        """Return the name of the rule of a value."""
        if schema is True or schema == {}:
            schema = _ANYTHING
        if not isinstance(schema, Mapping):
            refuse(f"the schema {json.dumps(schema)[:100]}")
        if id(schema) not in self._names:
            name = f"{self._rule}_{len(self._names)}"
            self._names[id(schema)] = name, schema
            self.written.append(f"{name}: {' | '.join(self._bodies(name, schema))}")
        return self._names[id(schema)][0]

    def _bodies(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        if "$ref" in schema:
            check_keywords(schema, SAYS_NOTHING | {"$ref"})
            return [self.of(referred(schema["$ref"], self._root))]
        for key in ("anyOf", "oneOf"):
            if key in schema:
                check_keywords(schema, SAYS_NOTHING | {key})
                return [self.of(member) for member in typed(list, schema, key) or ()]
        if "enum" in schema or "const" in schema:
            return self._choices(schema)
        types = schema.get("type", _guessed(schema))
        types = types if isinstance(types, list) else [types]
        for each in types:
            if each not in _TYPES:
                refuse(f"the type {json.dumps(each)[:100]}")
        check_keywords(schema, SAYS_NOTHING.union({"type"}, *(_TYPES[each] for each in types)))
        return [self._of_type(f"{name}_{each}", each, schema) for each in types]

    def _choices(self, schema: Mapping[str, Any]) -> list[str]:
        check_keywords(schema, SAYS_NOTHING | {"enum", "const", "type"})
        values = [schema["const"]] if "const" in schema else typed(list, schema, "enum") or []
        types = types_of(schema, self._root)
        allowed = [value for value in values if types is None or kind_of(value) in types]
        for value in allowed:
            if QUOTE in json.dumps(value, ensure_ascii=False).replace('\\"', '"'):
                refuse(f"the value {json.dumps(value)[:100]}")
        if not allowed:
            refuse("an empty enum")
        return [self._text(gemma_text(value)) for value in allowed]

    def _text(self, text: str) -> str:
        parts = text.split(QUOTE)
        return row(
            part
            for index, each in enumerate(parts)
            for part in ((self._quote if index else ""), json.dumps(each, ensure_ascii=False) if each else "")
        )

    def _of_type(self, name: str, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            self._string(name, schema)
        elif kind in _SCALARS:
            bounds = {key: schema[key] for key in _TYPES[kind] if key in schema}
            self.written.append(f"{name}: {json_rule({'type': kind, **bounds})}")
        elif kind == "array":
            self._array(name, schema)
        else:
            self._object(name, schema)
        return name

    def _string(self, name: str, schema: Mapping[str, Any]) -> None:
        terminal = (text_bounds(schema, "") or ANY_TEXT) + without(QUOTE)
        if self._quote.startswith("<["):
            # Only names in capitals are of terminals, which may be intersected.
            text = f"{name}_text".upper()
            self.written += [f"{name}: {self._quote} {text} {self._quote}", f"{text}: {terminal}"]
        else:
            text = f"{name}_text[suffix={self._quote}]: {terminal}"
            self.written += [f"{name}: {self._quote} {name}_text", text]

    def _array(self, name: str, schema: Mapping[str, Any]) -> None:
        item = self.of(schema.get("items", _ANYTHING))
        least, most = typed(int, schema, "minItems") or 0, typed(int, schema, "maxItems")
        end = "" if most is None else max(0, most - 1)
        rest = "" if end == 0 else f'("," {item}){{{max(0, least - 1)},{end}}}'
        several = "" if most == 0 else f"{item} {rest}" if least else f"({item} {rest})?"
        self.written.append(f'{name}: "[" {several} "]"')

    def _object(self, name: str, schema: Mapping[str, Any]) -> None:
        if "properties" not in schema and "required" not in schema:
            pair = f'/{KEY}/ ":" {self.of(_values(schema))}'
            self.written.append(f'{name}: "{{" ({pair} ("," {pair})*)? "}}"')
            return
        required = typed(list, schema, "required") or []
        properties = dict.fromkeys(required, True) | (typed(dict, schema, "properties") or {})
        firsts: list[str] = []
        is_open = True
        for number, key in enumerate(sorted(properties, key=lambda key: str(key).lower())):
            if not re.fullmatch(KEY, str(key)):
                refuse(f"the parameter {str(key)[:100]!r}")
            pair = f"{json.dumps(f'{key}:', ensure_ascii=False)} {self.of(properties[key])}"
            part = f'"," {pair}' if key in required else f'("," {pair})?'
            self.written.append(f"{name}_rest{number}: {part} {name}_rest{number + 1}")
            firsts += [f"{pair} {name}_rest{number + 1}"] if is_open else []
            is_open &= key not in required
        self.written.append(f"{name}_rest{len(properties)}: ")
        first = f"({' | '.join(firsts)})" + ("?" if is_open else "") if firsts else ""
        self.written.append(f'{name}: "{{" {first} "}}"')


def _values(schema: Mapping[str, Any]) -> object:
    """Return the schema of the values of an object without known keys."""
    given = schema.get("additionalProperties", True)
    return given if isinstance(given, Mapping) else _ANYTHING


def _guessed(schema: Mapping[str, Any]) -> object:
    """Return the types of a schema without any: those that its keywords are for, or all."""
    own = [kind for kind in ("object", "array", "string", "number") if _TYPES[kind] & schema.keys()]
    return own or _ANYTHING["type"]
