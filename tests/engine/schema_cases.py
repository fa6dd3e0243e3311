"""Schemas as people write them: by hand, from OpenAPI, pydantic, Kubernetes, event catalogues."""

from typing import Any

Schema = dict[str, Any]


def obj(required: str = "", closed: bool = False, **properties: Any) -> Schema:
    found: Schema = {"type": "object", "properties": properties}
    if required:
        found["required"] = required.split()
    return found | ({"additionalProperties": False} if closed else {})


TEXT, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}

# Formats that say nothing about what is valid.
ANNOTATIONS = [
    *("password", "binary", "byte", "path", "file-path", "directory-path", "uri-reference", "url", "decimal"),
    *("json-string", "int64", "int32", "float", "double", "regex", "base64url", "iri", "json-pointer"),
    *("idn-email", "uuid4", "color", "html", "phone"),
]

PATTERNS = [
    r'^[^"]*$', r"^[^\\]*$", r'^[^"\\]+$', r"\\", r'"', r"\n", r"^.{3}$", r"^a|b$", "a", "", r"^$",
    r"^\S+$", r"^\s\S$", r"^\D\d$", r"^\W\w$", r"^[^\d]$", r"^[^\w]{2}$", r"^[^\s]+$", r"^[\D]$",
    r"^[\S]$", r"^[^\S]$", r"^[[]$", r"^[a&&b]$", r"^[+--]$", r"^{.*}$", r"^\{\{[^}]*\}\}$",
    r"^[^a]{2}$", r"^\x41\u00e9\t$", r"^[\x00-\x1f]$", r"^[^\x00-\x1f]*$", r"^[\x7f-\xff]$",
    r"^[\x00-\x7F]+$", r"(?i)^ab[^k]$", r"^é{2}$", r"^[^/]+/[^/]+$", r"^\$ref$", r"(^a)|(b$)",
    r"^[\b]$", r"^[\w.\-]+$", r"^[\w-]+@\w+\.com$", r"^\<[^>]*\>$", r"^(?:[^\"]|x)*$", r"^\(?\d{3}\)?$",
    r"^(([0-9]|[1-9][0-9])\.){3}[0-9]+$", r"^#[0-9a-fA-F]{6}$", r"^(?P<y>\d{4})-(?P<m>\d\d)$",
    r'^("[^"]*"|[^",]+)$',
]  # fmt: skip
REFUSED_PATTERNS = [
    r"^(?!x).*$", r"(?<=a)b", r"\bfoo\b", r"^(a)\1$", r"^a\Z", r"^\Aa", r"^a{,3}$", r"^[]a]$", r"^a++$",
    r"^\ud83d$", r"^[b-a]$", r"^a(?i)b$", "^[a", "a\\",
]  # fmt: skip

NUMBERS: list[Schema] = [
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "integer", "exclusiveMinimum": -(2**63) - 1, "exclusiveMaximum": 2**63},
    {"type": "integer", "minimum": -(2**63)},
    {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    {"type": "integer", "minimum": 1e18},
    {"type": "integer", "maximum": -1e18},
    {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 9},
    {"type": "integer", "exclusiveMinimum": 2**53, "exclusiveMaximum": 2**53 + 4},
    {"type": "integer", "minimum": 2**60 + 1, "maximum": 2**60 + 2**10},
    {"type": "integer", "maximum": 999_999_999_999_999_999, "minimum": 999_999_999_999_000_000},
    {"type": "integer", "multipleOf": 7, "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "integer", "minimum": -1.5, "exclusiveMaximum": 2.5},
    {"type": "integer", "minimum": 3, "exclusiveMinimum": True},
    {"type": ["integer", "null"], "minimum": 2**62},
    {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
    {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 2**63 - 2},
    {"type": "number", "maximum": 2**60 + 3, "minimum": 2**60 - 900},
    {"minimum": 2**55 + 1},
    {"type": "number", "minimum": 15.381932921142933, "maximum": 15.382},
    {"type": "number", "exclusiveMinimum": -0.20110096267195817, "exclusiveMaximum": 1e-300},
    {"enum": [0.1, -1.5e-7, 2.50, 1e22 / 1e7]},
    {"enum": [2**63 - 1, 1, 2**53]},
    {"const": 10**18},
]

OBJECTS: list[Schema] = [
    obj(a=INTEGER),
    obj("a b", a=INTEGER, c=TEXT),
    obj("format", True, format={"type": "string", "format": "password"}, const={"const": {"format": "zzz"}}),
    {"type": "object", "patternProperties": {r"^\w+$": INTEGER}},
    {"type": "object", "patternProperties": {".*": {"type": "array", "items": INTEGER}}},
    {"type": "object", "patternProperties": {"^x-": INTEGER}, "additionalProperties": TEXT},
    {"type": "object", "patternProperties": {'^[^"]*$': INTEGER}, "additionalProperties": TEXT},
    {"type": "object", "patternProperties": {r"\d": INTEGER, "[0-9]": {"minimum": 3}}},
    {"type": "object", "minProperties": 1, "maxProperties": 3, "additionalProperties": INTEGER},
    {"type": "object", "propertyNames": {"pattern": "^x"}},
    {"type": "object", "propertyNames": {"enum": ["u", "v"]}, "additionalProperties": INTEGER},
    obj(a=INTEGER, b=INTEGER) | {"dependencies": {"a": ["b"]}},
    obj(a=INTEGER, b=INTEGER) | {"dependentRequired": {"a": ["b"]}},
    obj(a=INTEGER) | {"dependentSchemas": {"a": obj("b", b=TEXT)}},
    obj(a=INTEGER, b=INTEGER) | {"not": {"required": ["a", "b"]}},
    obj(a=INTEGER, b=INTEGER, c=TEXT) | {"not": {"anyOf": [{"required": ["a", "b"]}, {"required": ["c"]}]}},
    obj(a=INTEGER, b=INTEGER) | {"not": {"allOf": [{"required": ["a"]}, {"required": ["b"]}]}},
    obj(a=INTEGER, b=INTEGER) | {"not": {"required": ["a"], "properties": {"a": {"minimum": 3}}}},
    obj(a=INTEGER, b={"description": "never", "not": {}}),
    {"not": {"type": ["integer", "object"]}},
    {"not": {"type": "number"}},
    {"not": {"not": {"type": "string"}, "type": "string"}, "type": ["string", "null"]},
    {"not": False, "type": "integer"},
    obj(a=INTEGER) | {"unevaluatedProperties": False},
    {"type": "array", "items": INTEGER, "uniqueItems": False},
    {"type": "array", "items": INTEGER, "uniqueItems": True, "maxItems": 1},
    {
        "$ref": "#/components/schemas/X",
        "components": {"schemas": {"X": {"type": "string", "format": "byte"}}},
    },
    {
        "$ref": "#/$defs/N",
        "$defs": {"N": obj("v", v=INTEGER, next={"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]})},
    },
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {
            "p": {"type": "string", "pattern": "^[a-z]+$", "description": "a port", "default": "x"}
        },
        **obj("ports", ports={"type": "array", "minItems": 1, "items": {"$ref": "#/definitions/p"}}),
    },
    obj(
        "url",
        True,
        url={"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083, "title": "Url"},
    ),
    obj(
        "kind",
        kind={"type": "string", "enum": ["Pod"]},
        spec={"type": "object", "x-kubernetes-preserve": True},
    ),
    {
        "self": {"vendor": "com.a", "format": "jsonschema", "version": "1-0-0"},
        **obj("id", id={"type": "string", "maxLength": 4}),
    },
    {
        "allOf": [
            obj("a", a=INTEGER),
            obj("b", b={"type": "string", "format": "date-time", "deprecated": True}),
        ]
    },
]

A, B = obj("kind", kind={"const": "a"}, x=INTEGER), obj("kind", kind={"enum": ["b", "c"]}, x=TEXT)
ONE_OF: list[Schema] = [
    {"oneOf": [TEXT, INTEGER, {"type": "null"}]},
    {"oneOf": [{"const": "a"}, {"enum": ["a", "b"]}, {"enum": ["b", "c"]}]},
    {"oneOf": [{"const": 1}, {"const": True}, {"type": "string"}]},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 5, "maxLength": 6}]},
    {"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "exclusiveMinimum": 5}]},
    {"oneOf": [{"type": "array", "minItems": 2}, {"type": "array", "maxItems": 1}]},
    {"oneOf": [A, B]},
    {"oneOf": [A, obj(kind={"const": "z"})]},
    {"oneOf": [obj("a", True, a=INTEGER), obj("b", True, b=INTEGER)]},
    {"oneOf": [obj("a", a=INTEGER), obj("b", b=INTEGER)]},
    {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": A, "B": B}},
    {
        "oneOf": [{"type": "null"}, {"$ref": "#/$defs/T"}],
        "$defs": {"T": obj(n={"oneOf": [{"type": "null"}, {"$ref": "#/$defs/T"}]})},
    },
    obj(a=INTEGER, b=INTEGER) | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    obj(a=INTEGER, b=INTEGER) | {"oneOf": [{"required": ["a"]}, {"required": ["a", "b"]}]},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]},
    {
        "oneOf": [
            {"not": {"required": ["r"]}, "required": ["l"]},
            {"not": {"required": ["l"]}, "required": ["r"]},
        ],
        "type": "object",
    },
    {"oneOf": [{"type": "string"}], "anyOf": [{"minLength": 1}, {"maxLength": 0}]},
    {"oneOf": [True, False]},
    {
        "allOf": [
            {"oneOf": [{"type": "string"}, {"type": "integer"}]},
            {"oneOf": [{"type": "integer"}, {"type": "null"}]},
        ]
    },
]
UNDECIDED: list[Schema] = [
    {"oneOf": [NUMBER, INTEGER]},
    {"oneOf": [TEXT, {"const": "x"}]},
    {"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 5}]},
    {"oneOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}]},
    {"oneOf": [{}, TEXT]},
    {"oneOf": [True, True]},
    {"oneOf": [{"enum": [1, 2]}, {"enum": [2, 1]}]},
    {"oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]},
    {"oneOf": [obj(a=INTEGER), obj(b=INTEGER)]},
    {
        # In this draft, what stands beside a reference does not count.
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"K": obj(k=TEXT)},
        "oneOf": [
            {"$ref": "#/definitions/K", "required": ["k"], "properties": {"k": {"const": "a"}}},
            {"$ref": "#/definitions/K", "required": ["k"], "properties": {"k": {"const": "b"}}},
        ],
    },
]
