"""Makes an anyOf of a oneOf, where no value is valid under two variants, or where that can be excluded."""

from collections.abc import Sequence
from typing import Any

from octavo.engine.structured.facts import FactFinder, Facts, is_among
from octavo.errors import StructuredOutputError


def without_one_of(schema: dict[str, Any], finder: FactFinder) -> None:
    """Say in place with anyOf what a schema's oneOf says: what exactly one of its variants allows.

    Args:
        schema: its other keywords hold for each variant.
        finder: of facts about it.

    Raises:
        StructuredOutputError: two variants may allow the same value, and that cannot be excluded.
    """
    variants = schema.get("oneOf")
    if not isinstance(variants, list):
        return
    base = {name: value for name, value in schema.items() if name != "oneOf"}
    facts = [finder.facts([base, variant]) for variant in variants]
    alone: list[Any] = []
    for number in range(len(variants)):
        alone += _alone(number, variants, facts, finder)
    if not alone:
        raise StructuredOutputError("oneOf cannot be held to: all that one variant allows, another does, too")
    said = {"anyOf" if name == "oneOf" else name: value for name, value in schema.items() if name != "anyOf"}
    said["anyOf"] = alone
    if "anyOf" in base:
        said["allOf"] = [*base.get("allOf", ()), {"anyOf": base["anyOf"]}]
    schema.clear()
    schema.update(said)


def _alone(number: int, variants: Sequence[Any], facts: Sequence[Facts], finder: FactFinder) -> list[Any]:
    """Return what of a variant no other one allows: itself, something narrower, or nothing."""
    variant, own = variants[number], facts[number]
    others = {
        place: other
        for place, other in enumerate(facts)
        if place != number and not finder.are_disjoint(own, other)
    }
    if own.values is not None and all(other.values is not None for other in others.values()):
        left = [v for v in own.values if not any(is_among(v, o.values or ()) for o in others.values())]
        both = others and len(left) < len(own.values)
        return [variant] if not both else [{"allOf": [variant, {"enum": left}]}] if left else []
    forbidden: dict[str, bool] = {}
    for place, other in others.items():
        keys = sorted(other.required - own.required)
        if not keys and _asks_only_for_keys(variants[place]):
            return []
        if not keys or other.values is not None:
            first, second = sorted((number, place))
            raise StructuredOutputError(
                f"oneOf cannot be held to: its variants {first + 1} and {second + 1} may both allow a value; "
                "let them differ in a property with a const, or say anyOf"
            )
        forbidden[keys[0]] = False
    return [{"allOf": [variant, {"type": "object", "properties": forbidden}]}] if forbidden else [variant]


def _asks_only_for_keys(variant: Any) -> bool:
    """Return whether a variant says nothing but which keys an object has."""
    return isinstance(variant, dict) and variant.keys() <= {"description", "required", "title"}
