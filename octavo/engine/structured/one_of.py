"""Makes an anyOf of a oneOf, where no value is valid under two variants, or where that can be excluded."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

from octavo.engine.structured.facts import FactFinder, Facts, identity
from octavo.errors import StructuredOutputError

# Each is compared with each.
_MAX_VARIANTS = 128


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
    disjoint = _disjoint_variants(variants, facts, finder)
    if not disjoint:
        raise StructuredOutputError("oneOf cannot be held to: all that one variant allows, another does, too")
    result = {
        "anyOf" if name == "oneOf" else name: value for name, value in schema.items() if name != "anyOf"
    }
    result["anyOf"] = disjoint
    if "anyOf" in base:
        result["allOf"] = [*base.get("allOf", ()), {"anyOf": base["anyOf"]}]
    schema.clear()
    schema.update(result)


def _disjoint_variants(variants: Sequence[Any], facts: Sequence[Facts], finder: FactFinder) -> Sequence[Any]:
    """Return variants that allow only what no other one allows."""
    if _have_discriminator(facts, finder):
        return variants
    if all(own.values is not None for own in facts):
        counts = Counter(known for own in facts for known in {identity(value) for value in own.values or ()})
        return _concatenated(
            _left(variant, own, counts) for variant, own in zip(variants, facts, strict=True)
        )
    if len(variants) > _MAX_VARIANTS:
        raise StructuredOutputError(
            f"oneOf cannot be held to: it has {len(variants)} variants, more than {_MAX_VARIANTS}, without a "
            "required property of another constant in each"
        )
    pairs = [(i, j) for j in range(len(facts)) for i in range(j)]
    meeting = [pair for pair in pairs if not finder.are_disjoint(facts[pair[0]], facts[pair[1]])]
    return _concatenated(_narrowed(number, variants, facts, meeting) for number in range(len(variants)))


def _concatenated(lists: Any) -> list[Any]:
    return [variant for found in lists for variant in found]


def _have_discriminator(facts: Sequence[Facts], finder: FactFinder) -> bool:
    """Return whether all require a property that has other values in each, which is quickly checked."""
    shared = set.intersection(*(own.required for own in facts)) if facts else set()
    for key in sorted(shared):
        values = [finder.facts(own.of(key)).values for own in facts]
        known = [{identity(value) for value in found} for found in values if found is not None]
        if len(known) == len(facts) and len(set().union(*known)) == sum(map(len, known)):
            return all(own.types == {"object"} for own in facts)
    return False


def _left(variant: Any, own: Facts, counts: Counter[Any]) -> list[Any]:
    """Return a variant of known values without those that occur in others."""
    values = own.values or []
    left = [value for value in values if counts[identity(value)] == 1]
    if len(left) == len(values):
        return [variant]
    return [{"allOf": [variant, {"enum": left}]}] if left else []


def _narrowed(
    number: int, variants: Sequence[Any], facts: Sequence[Facts], meeting: Sequence[tuple[int, int]]
) -> list[Any]:
    """Return what of a variant no other one allows: itself, without keys that others require, or nothing."""
    own, forbidden = facts[number], dict[str, bool]()
    for pair in meeting:
        if number not in pair:
            continue
        other = pair[0] if pair[1] == number else pair[1]
        keys = sorted(facts[other].required - own.required)
        if not keys and _asks_only_for_keys(variants[other]):
            return []
        if not keys or facts[other].values is not None:
            _refuse(pair)
        forbidden[keys[0]] = False
    variant = variants[number]
    return [{"allOf": [variant, {"type": "object", "properties": forbidden}]}] if forbidden else [variant]


def _refuse(pair: tuple[int, int]) -> NoReturn:
    raise StructuredOutputError(
        f"oneOf cannot be held to: its variants {pair[0] + 1} and {pair[1] + 1} may both allow a value; "
        "let them differ in a property with a const, or say anyOf"
    )


def _asks_only_for_keys(variant: Any) -> bool:
    """Return whether a variant says nothing but which keys an object has."""
    return isinstance(variant, dict) and variant.keys() <= {"description", "required", "title"}
