"""JSON schemas are held to the letter: every output that a mask allows is valid by the jsonschema package."""

import json
import warnings
from typing import Any

import pytest
from jsonschema.validators import validator_for
from schema_cases import (
    ANNOTATIONS,
    NUMBERS,
    OBJECTS,
    ONE_OF,
    PATTERNS,
    REFUSED_PATTERNS,
    UNDECIDED,
)
from schema_walks import compiled, takes, walk

from octavo.engine.structured.schemas import FORMATS, strict_schema
from octavo.errors import StructuredOutputError

pytestmark = pytest.mark.filterwarnings("ignore:Possible (nested set|set)")


def check(schema: dict[str, Any], num_walks: int = 25, least: int = 1) -> None:
    """Validate random outputs; the shortest are not cut."""
    grammar, validator = compiled(schema), validator_for(schema)(schema)
    texts = [text for seed in range(num_walks) if (text := walk(grammar, seed)) is not None]
    assert len(set(texts)) >= least
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for text in texts:
            error = next(validator.iter_errors(json.loads(text)), None)
            assert error is None, f"{text!r}: {error}"


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_a_format_that_is_an_annotation_is_ignored(name: str) -> None:
    assert name not in FORMATS
    check({"type": "string", "format": name}, 5)
    assert takes(compiled({"type": "string", "format": name}), '"anything: ☃"')
    assert takes(compiled({"type": ["integer", "null"], "format": name}), "17")
    assert takes(compiled({"format": name}), "[1]")
    nested = {
        "type": "array",
        "items": {"anyOf": [{"type": "object", "additionalProperties": {"format": name}}]},
    }
    assert takes(compiled(nested), '[{"a":"b"}]')


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_other_formats_hold(name: str) -> None:
    grammar = compiled({"type": "string", "format": name})
    assert not takes(grammar, '"anything: ☃"')
    assert walk(grammar, 1)


def test_values_that_look_like_keywords_are_left_alone() -> None:
    value = {"format": "x", "pattern": "(", "oneOf": [1], "minimum": "a"}
    schema = {
        "type": "object",
        "properties": {"pattern": {"enum": [value]}, "oneOf": {"const": value}},
        "required": ["pattern", "oneOf"],
        "additionalProperties": False,
        "default": value,
        "examples": [value],
    }
    check(schema, 5)
    text = json.dumps({"pattern": value, "oneOf": value}, separators=(",", ":"))
    assert takes(compiled(schema), text)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_what_the_json_says(pattern: str) -> None:
    check({"type": "string", "pattern": pattern}, 60)


@pytest.mark.parametrize("pattern", [p for p in PATTERNS if p.startswith("^") and p.endswith("$")])
def test_a_pattern_holds_beside_other_bounds(pattern: str) -> None:
    check({"type": "string", "pattern": pattern, "maxLength": 12}, 30)


@pytest.mark.parametrize("pattern", REFUSED_PATTERNS)
def test_a_pattern_that_cannot_be_held_to_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(StructuredOutputError) as caught:
        compiled({"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}})
    assert "properties.a: the pattern" in str(caught.value)


def test_what_a_pattern_is_for_is_still_possible() -> None:
    for pattern, text in (
        (r'^[^"]*$', "a\\b c☃\n"),
        (r"^\S+ \S+$", "é\\ ☃"),
        (r"^[\w.-]+$", "a_b.c-9"),
        (r"^.*\.(png|jpe?g)$", 'a "b"/\\.jpeg'),
        (r"^\d{3}-\D+$", "123-ab c"),
        (r"^{\w+}$", "{a}"),
        (r"^[[\]&~-]+$", "[]&~-"),
        (r"^\p{Lu}", "Éa"),
    ):
        assert takes(
            compiled({"type": "string", "pattern": pattern}), json.dumps(text, ensure_ascii=False)
        ), pattern


@pytest.mark.parametrize("schema", NUMBERS, ids=str)
def test_bounds_hold_over_64_bits(schema: dict[str, Any]) -> None:
    check(schema)
    grammar, validator = compiled(schema), validator_for(schema)(schema)
    edges = (0, 3, 2**53, 2**60, 10**18, 2**62, 2**63, 2**64)
    for value in (sign * edge + step for edge in edges for sign in (-1, 1) for step in range(-3, 4)):
        assert validator.is_valid(value) or not takes(grammar, str(value)), value


def test_the_whole_range_is_there() -> None:
    int64 = compiled({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1})
    assert all(takes(int64, str(value)) for value in (2**63 - 1, 0, -1, 10**18, -(10**18), -(2**63) + 1024))
    assert takes(compiled({"const": 2**63 - 1}), str(2**63 - 1))


@pytest.mark.parametrize(
    "value",
    [2**53 + 1, 2**63, -(2**63), 1234567890123456789, 10**400, 15.381932921142933, {"a": [2**53 + 1]}],
)
def test_a_number_that_would_become_another_is_refused_by_name(value: object) -> None:
    for schema in ({"const": value}, {"enum": ["a", value]}):
        with pytest.raises(StructuredOutputError, match="has too many digits"):
            compiled(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 2**63},
        {"type": "integer", "maximum": -(2**63)},
        {"type": "integer", "minimum": 2**60 + 1, "maximum": 2**60 + 2},
        {"type": "number", "minimum": 1e19},
    ],
)
def test_a_range_that_is_too_far_out_is_refused_by_name(schema: dict[str, Any]) -> None:
    with pytest.raises(StructuredOutputError, match="more than 64 bits"):
        compiled(schema)


@pytest.mark.parametrize("schema", [*OBJECTS, *ONE_OF], ids=str)
def test_objects_and_one_of_are_valid(schema: dict[str, Any]) -> None:
    check(schema, 40)


@pytest.mark.parametrize("schema", UNDECIDED, ids=str)
def test_variants_that_may_overlap_are_refused_by_name(schema: dict[str, Any]) -> None:
    with pytest.raises(StructuredOutputError, match=r"oneOf cannot be held to: (its variants|all that)"):
        compiled({"type": "array", "items": schema} if "$schema" not in schema else schema)


def test_a_name_in_escapes_is_no_other_name() -> None:
    named = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert takes(compiled(named), '{"a":1,"b":"x"}')
    assert not takes(compiled(named), '{"\\u0061":"x"}')
    assert not takes(compiled({"type": "object", "patternProperties": {"^a": named}}), '{"\\u0061":"x"}')


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "minProperties": 2}, "minProperties: 2"),
        ({"type": "object", "properties": {"a": {"items": {"type": "strin"}}}}, "properties.a.items: type"),
        ({"properties": {"a": 5}}, "properties.a: expected a schema"),
        ({"properties": [1]}, "properties must be an object"),
        ({"required": "a"}, "required must be a list"),
        ({"type": []}, "type must be"),
        ({"anyOf": [{"minimum": "3"}]}, r"anyOf\[0\]: minimum"),
        ('{"maximum": 1e999, "type": "integer"}', "maximum must be a finite"),
        ({"$defs": {"a": {"format": 3}}}, r"defs.a: format"),
    ],
)
def test_what_is_wrong_with_a_schema_is_said_with_its_place(schema: Any, named: str) -> None:
    with pytest.raises(StructuredOutputError, match=named):
        compiled(schema)


def test_a_schema_is_not_changed_by_its_use() -> None:
    schema = {
        "oneOf": [{"format": "byte", "type": "string"}, {"type": "null"}],
        "x-guidance": {"lenient": True},
    }
    before = json.dumps(schema)
    held = strict_schema(schema, {"whitespace_pattern": " "})
    assert json.dumps(schema) == before
    assert held == {
        "anyOf": [{"type": "string"}, {"type": "null"}],
        "x-guidance": {"whitespace_pattern": " "},
    }
