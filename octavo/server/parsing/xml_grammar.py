"""Rules for the parameters of a call in XML: what a schema allows and the reader reads back."""

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from octavo.engine.structured.patterns import translated
from octavo.engine.structured.schemas import FORMATS
from octavo.errors import StructuredOutputError
from octavo.server.parsing.custom.text_tool import lark_rules
from octavo.server.parsing.grammar_rules import ANY_TEXT, json_rule, pattern_terminal, row, without
from octavo.server.parsing.xml_values import ValueKind, XmlTags, referred

Kind = TypeVar("Kind")

SAYS_NOTHING = frozenset(
    {"$comment", "$id", "$schema", "default", "deprecated", "description", "example", "examples", "title"}
)
"""Keywords that hold a value to nothing."""

_OF_OBJECTS = SAYS_NOTHING | {
    "$defs",
    "additionalProperties",
    "definitions",
    "properties",
    "required",
    "type",
}
_OF_TEXTS = SAYS_NOTHING | {"maxLength", "minLength", "pattern", "type"}
_OF_UNIONS = SAYS_NOTHING | {"$ref", "anyOf", "oneOf", "type"}
_KEY = re.compile(r"[^<>\n]{1,256}")
_MAX_REFERENCES = 16


def parameter_rules(rule: str, schema: Mapping[str, Any] | None, tags: XmlTags) -> list[str]:
    """Return rules of all parameters of a call, in their schema's order.

    Args:
        rule: the name of the first rule.
        schema: that of the arguments; None: any arguments.
        tags: of calls.

    Raises:
        StructuredOutputError: the schema says what text between tags cannot express.
    """
    if (of_text := lark_rules(rule, schema, tags)) is not None:
        return of_text
    if schema is None:
        key = f'{json.dumps(tags.parameter)} /[^<>"\\n]{{1,256}}/ {_end_key("", tags)}'
        return [
            f"{rule}: ({key} {rule}_text {tags.gap})*",
            _text_rule(f"{rule}_text", _free_text(tags), tags),
        ]
    check_keywords(schema, _OF_OBJECTS)
    required = typed(list, schema, "required") or []
    properties = dict(typed(dict, schema, "properties") or {})
    properties |= {key: {} for key in required if key not in properties}
    parts, rules = [], []
    for number, (key, value) in enumerate(properties.items()):
        if not _KEY.fullmatch(str(key)):
            refuse(f"the parameter {str(key)[:100]!r}")
        if '"' in str(key) and tags.end_keys[0].startswith('"'):
            refuse(f"the parameter {str(key)[:100]!r}")
        part = f"{_end_key(f'{tags.parameter}{key}', tags)} {rule}_{number}"
        parts.append(part if key in required else f"({part})?")
        rules += _value_rules(f"{rule}_{number}", value, schema, tags)
    return [f"{rule}: {' '.join(parts)}", *rules]


def _end_key(begin: str, tags: XmlTags) -> str:
    """Return a rule of a text and the end of a parameter's key."""
    return f"({' | '.join(json.dumps(begin + end, ensure_ascii=False) for end in tags.end_keys)})"


def _free_text(tags: XmlTags) -> str:
    # Another parameter's tag would look as if this one's end was missing.
    return ANY_TEXT + without(tags.parameter)


def _value_rules(rule: str, schema: object, root: Mapping[str, Any], tags: XmlTags) -> list[str]:
    """Return the rules of one value and of the text around it."""
    for _ in range(_MAX_REFERENCES):
        if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            check_keywords(schema, SAYS_NOTHING | {"$ref"})
            schema = referred(schema["$ref"], root)
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        refuse(f"the schema {json.dumps(schema)[:100]}")
    kind = ValueKind.of(schema, root)
    types = kind.types
    values = [schema["const"]] if "const" in schema else typed(list, schema, "enum")
    if values is not None:
        return [_choice_rule(rule, values, kind, tags)]
    if types is not None and "string" not in types:
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        around = json.dumps(tags.around) if tags.around else ""
        end = json.dumps(tags.around + tags.end_parameter)
        return [
            f"{rule}: {row([around, f'{rule}_json', end, tags.gap])}",
            f"{rule}_json: {json_rule({**schema, **shared})}",
        ]
    if types == {"string"} and _keywords(schema) <= _OF_TEXTS:
        bounds = text_bounds(schema, tags.around)
        text = bounds + without(tags.end_parameter, tags.parameter) if bounds else _free_text(tags)
    else:
        _check_union(schema, root)
        text = _free_text(tags)
    return [f"{rule}: {rule}_text {tags.gap}", _text_rule(f"{rule}_text", text, tags)]


def _choice_rule(rule: str, values: list[Any], kind: ValueKind, tags: XmlTags) -> str:
    """Return a rule of one of several values, each of which must be read back as itself."""
    texts = []
    for value in values:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        is_misread = json.loads(kind.as_json(text)) != value
        if is_misread or tags.end_parameter in text or tags.parameter in text:
            refuse(f"the value {json.dumps(value)[:100]}")
        texts.append(json.dumps(f"{tags.around}{text}{tags.around}{tags.end_parameter}", ensure_ascii=False))
    if not texts:
        refuse("an empty enum")
    return f"{rule}: ({' | '.join(texts)}) {tags.gap}"


def _text_rule(rule: str, terminal: str, tags: XmlTags) -> str:
    """Return a rule of a text up to its closing tag."""
    return f"{rule}[suffix={json.dumps(tags.end_parameter)}]: {terminal}"


def text_bounds(schema: Mapping[str, Any], around: str) -> str:
    """Return a terminal for a string that its schema bounds, with white space around it; or no text."""
    bounds = []
    if "minLength" in schema or "maxLength" in schema:
        least, most = typed(int, schema, "minLength") or 0, typed(int, schema, "maxLength")
        bounds.append(f"(?s:.{{{least},{'' if most is None else most}}})")
    written = typed(str, schema, "pattern")
    if written is not None:
        pattern = translated(written)
        before = "" if pattern.startswith("^") else "(?s:.*)"
        after = "" if pattern.endswith("$") and not pattern.endswith(r"\$") else "(?s:.*)"
        inner = pattern[not before :] if after else pattern[not before : -1]
        bounds.append(f"{before}(?:{inner}){after}")
    return " & ".join(pattern_terminal(f"{around}{bound}{around}") for bound in bounds)


def _check_union(schema: Mapping[str, Any], root: Mapping[str, Any]) -> None:
    """Check that the schema allows any text: as a string, or as the value that it spells."""
    waiting: list[object] = [schema]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if not isinstance(part, Mapping):
            refuse(f"the schema {json.dumps(part)[:100]}")
        check_keywords(part, _OF_UNIONS)
        waiting += [*(typed(list, part, "anyOf") or ()), *(typed(list, part, "oneOf") or ())]
        if "$ref" in part:
            waiting.append(referred(part["$ref"], root))


def typed(kind: type[Kind], schema: Mapping[str, Any], key: str) -> Kind | None:
    """Return a keyword's value, its type checked; None if the keyword is missing."""
    value = schema.get(key)
    if value is not None and type(value) is not kind:
        refuse(f"{key!r} of type {type(value).__name__}")
    return value


def check_keywords(schema: Mapping[str, Any], known: frozenset[str]) -> None:
    """Refuse a schema with a keyword that is not known."""
    unknown = sorted(_keywords(schema) - known)
    if unknown:
        refuse(f"{unknown[0]!r} of a schema")


def _keywords(schema: Mapping[str, Any]) -> set[str]:
    """Return a schema's keywords, without a format that is an annotation."""
    return {
        name
        for name, value in schema.items()
        if name != "format" or not isinstance(value, str) or value in FORMATS
    }


def refuse(what: str) -> NoReturn:
    """Raise the error that names what no grammar can hold to."""
    raise StructuredOutputError(f"{what} cannot be held to in this model's format")
