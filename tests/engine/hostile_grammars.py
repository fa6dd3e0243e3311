"""Grammars that try to cost much: each must be refused, or be cheap to follow."""

import functools
import json

from octavo.sampling_params import StructuredOutput


def _schema(schema: object) -> StructuredOutput:
    return StructuredOutput(json_schema=json.dumps(schema))


def _rules(form: str, num: int, last: str) -> StructuredOutput:
    """A chain of rules: form holds {0}, this rule's number, and {1}, the next one's."""
    rules = "\n".join(form.format(i, i + 1) for i in range(num))
    return StructuredOutput(grammar=f"start: {'r' if 'r0' in rules else 'T'}0*\n{rules}\n{last}")


def _chain(num: int, link: object) -> StructuredOutput:
    """$defs that refer to one another; "NEXT" in a link is the next one's path."""
    text = json.dumps(link)
    defs = {f"d{i}": json.loads(text.replace("NEXT", f"#/$defs/d{i + 1}")) for i in range(num)}
    return _schema({"$ref": "#/$defs/d0", "$defs": {**defs, f"d{num}": {"type": "string"}}})


_STRING = {"type": "string"}
_LONG_ARRAY = {"type": "array", "minItems": 100, "maxItems": 100}

HOSTILE = {
    "nested plus": StructuredOutput(regex="((((a+)+)+)+)+b"),
    "long repetition": StructuredOutput(regex="a{1,100000}"),
    "nested repetition": StructuredOutput(regex="((.{1,300}x){1,300}y){1,300}"),
    "many words": StructuredOutput(regex="|".join(f"word{i}" for i in range(6000))),
    "exponential automaton": StructuredOutput(regex="(.*a.{20}b)+"),
    "exponential automaton, long": StructuredOutput(regex=".*a.{500}b"),
    "unicode classes": StructuredOutput(regex=r"(\w+\s?){500}"),
    "deep parentheses": StructuredOutput(regex="(" * 5000 + "a" + ")" * 5000),
    "nothing matches": StructuredOutput(regex="[^\\x00-\\U0010FFFF]"),
    "intersections": StructuredOutput(
        grammar="start: A\nA: " + " & ".join(f"/.*{c}.*/" for c in "abcdefghijklmnop")
    ),
    "left recursion": StructuredOutput(grammar='start: start start | "a" | '),
    "ambiguity": StructuredOutput(grammar='start: x x x x x x\nx: y | \ny: x "a" | "a"'),
    "a rule of itself": StructuredOutput(grammar="start: start"),
    "chain of alternatives": _rules('r{0}:"a"|r{1}', 4000, 'r4000: "z"'),
    "chain of rules": _rules("r{0}:r{1}", 5000, 'r5000: "z"'),
    "chain of terminals": _rules("T{0}:T{1}", 5000, 'T5000: "z"'),
    "growing terminals": _rules('T{0}:"a" T{1}', 4000, 'T4000: "z"'),
    "exponential rules": _rules("r{0}: r{1} r{1}", 40, 'r40: "z"'),
    "exponential terminals": _rules("T{0}: T{1} T{1}", 30, 'T30: "z"'),
    "repeated repetition": StructuredOutput(grammar='start: ("a"{1,1000}){1,1000}'),
    "a million times": StructuredOutput(grammar='start: x{1000000}\nx: "a"'),
    "deep JSON in Lark": StructuredOutput(grammar="start: %json " + '{"items":' * 5000 + "{}" + "}" * 5000),
    "long enum": _schema({"enum": [f"v{i}" for i in range(5000)]}),
    "many properties": _schema({"type": "object", "properties": {f"p{i}": _STRING for i in range(1500)}}),
    "many required": _schema({"type": "object", "required": [f"r{i}" for i in range(5000)]}),
    "many needed properties": _schema(
        {
            "type": "object",
            "properties": {f"p{i}": _STRING for i in range(1200)},
            "required": [f"p{i}" for i in range(1200)],
        }
    ),
    "long string": _schema({"type": "string", "minLength": 1000000, "maxLength": 2000000}),
    "long array": _schema({"type": "array", "items": _STRING, "minItems": 100000, "maxItems": 1000000}),
    "arrays of arrays": _schema(
        {**_LONG_ARRAY, "items": {**_LONG_ARRAY, "items": {**_LONG_ARRAY, "items": _STRING}}}
    ),
    "refers to itself": _schema({"$ref": "#"}),
    "refers in a ring": _schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "chain of references": _chain(1500, {"$ref": "NEXT"}),
    "chain of items": _chain(1200, {"items": {"$ref": "NEXT"}}),
    "chain of allOf": _chain(1200, {"allOf": [{"$ref": "NEXT"}]}),
    "exponential allOf": _chain(25, {"allOf": [{"$ref": "NEXT"}, {"$ref": "NEXT"}]}),
    "exponential anyOf": _chain(25, {"anyOf": [{"$ref": "NEXT"}, {"items": {"$ref": "NEXT"}}]}),
    "product of anyOf": _schema(
        {"allOf": [{"anyOf": [{"properties": {f"a{i}_{j}": _STRING}} for j in range(6)]} for i in range(12)]}
    ),
    "product of oneOf": _schema(
        {"allOf": [{"oneOf": [{"properties": {f"a{i}_{j}": _STRING}} for j in range(6)]} for i in range(12)]}
    ),
    "pattern": _schema({"type": "string", "pattern": "^(a+)+(b+)+.{500,1000}$"}),
    "many patterns": _schema(
        {"type": "object", "patternProperties": {f"^(a|b)*{i}.{{30}}$": _STRING for i in range(30)}}
    ),
    "large multiples": _schema(
        {"type": "integer", "multipleOf": 982451653, "minimum": 0, "maximum": 10**300}
    ),
    "wide range": _schema({"type": "number", "minimum": 1e-300, "maximum": 1e300}),
    "another host": _schema({"$ref": "http://127.0.0.1:9/x.json"}),
    "a file": _schema({"$ref": "file:///etc/passwd"}),
    "no value": _schema(False),
    "unknown type": _schema({"type": "nope"}),
    "deep": _schema(
        functools.reduce(lambda inner, _: {"type": "array", "items": inner}, range(31), dict(_STRING))
    ),
    "names by pattern": _schema({"type": "object", "propertyNames": {"pattern": ".*a.{100}"}}),
}
