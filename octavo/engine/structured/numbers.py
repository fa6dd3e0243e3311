"""Bounds of numbers for llguidance, which keeps them as doubles and counts integers in 64 bits.

Bounds that it would round, or refuse, become the nearest ones inside that it represents exactly.
"""

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal, localcontext
from typing import Any

from octavo.errors import StructuredOutputError

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Doubles hold every integer up to here.
_EXACT = 2**53
# The first double within 64 bits; the last one: llguidance takes 2**63 for 2**63 - 1.
_FIRST, _LAST = -(2**63 - 1024), 2**63 - 1024
_LARGEST = 2**63 - 1
# Significant digits, and places after the point, that its parser reads exactly.
_NUM_DIGITS, _NUM_PLACES = 15, 22
# With one bound of more digits than this, llguidance finds no range.
_ONE_SIDED = 10**18


def exact_bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with bounds that llguidance represents exactly; it allows no number that is new.

    Raises:
        StructuredOutputError: no number is left.
    """
    bounds = {name: schema[name] for name in _BOUNDS if _is_number(schema.get(name))}
    if all(_is_read_exactly(bound) for bound in bounds.values()):
        return dict(schema)
    kept = {name: value for name, value in schema.items() if name not in _BOUNDS}
    types = schema.get("type", "number")
    is_integer = types == "integer" or (isinstance(types, list) and "number" not in types)
    exact = (_integer_bounds if is_integer else _number_bounds)(schema, bounds)
    low, high = exact.get("minimum"), exact.get("maximum")
    if low is not None and high is None and low >= _ONE_SIDED:
        exact["maximum"] = high = _LARGEST if is_integer else _LAST
    if high is not None and low is None and high <= -_ONE_SIDED:
        exact["minimum"] = low = _FIRST
    if low is not None and high is not None and low > high:
        ranges = ", ".join(f"{name} {bound}" for name, bound in bounds.items())
        raise StructuredOutputError(f"no number can be held to {ranges}: they need more than 64 bits")
    if high == _LARGEST:
        # A double, which llguidance takes for one less.
        exact["maximum"] = 2**63
    return kept | exact


def check_number(value: object, what: str) -> None:
    """Check that a value that must come is a number that llguidance represents exactly, or no number.

    Raises:
        StructuredOutputError: it would become another number.
    """
    if not _is_number(value) or value == _LARGEST:
        return
    assert isinstance(value, int | float)
    is_whole = not value % 1
    if abs(value) > _LAST or (value != int(float(value)) if is_whole else not _is_read_exactly(value)):
        raise StructuredOutputError(f"{what} cannot be held to: {value} has too many digits; use a string")


def _is_read_exactly(value: int | float) -> bool:
    """Return whether llguidance reads a number as it is: its parser errs in a double's last digit."""
    if abs(value) >= _EXACT or isinstance(value, int):
        return abs(value) < _EXACT
    digits = Decimal(repr(value)).normalize().as_tuple()
    return len(digits.digits) <= _NUM_DIGITS and int(digits.exponent) >= -_NUM_PLACES


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer_bounds(schema: Mapping[str, Any], bounds: Mapping[str, int | float]) -> dict[str, Any]:
    """Return the least and the largest integer, each a double, or 2**63 - 1."""
    exact: dict[str, Any] = {}
    lows = [_first_integer(schema, name, bound, 1) for name, bound in bounds.items() if "inimum" in name]
    highs = [-_first_integer(schema, name, bound, -1) for name, bound in bounds.items() if "aximum" in name]
    if lows:
        exact["minimum"] = _double_above(max(lows))
    if highs:
        high = min(highs)
        exact["maximum"] = _LARGEST if high >= _LARGEST else -_double_above(-high)
    return exact


def _first_integer(schema: Mapping[str, Any], name: str, bound: int | float, sign: int) -> int:
    """Return the first integer from a bound on, upwards; downwards it is negated, as the bound is."""
    bound = sign * bound
    return math.floor(bound) + 1 if _is_open(schema, name) else math.ceil(bound)


def _is_open(schema: Mapping[str, Any], name: str) -> bool:
    """Return whether a bound is exclusive: by its name, or by a switch in old drafts."""
    return name.startswith("exclusive") or schema.get(f"exclusive{name.capitalize()}") is True


def _number_bounds(schema: Mapping[str, Any], bounds: Mapping[str, int | float]) -> dict[str, Any]:
    """Return bounds, of which those that a double may not hold are inclusive ones inside."""
    exact: dict[str, Any] = {}
    for name, bound in bounds.items():
        is_low = "inimum" in name
        is_open = _is_open(schema, name)
        if _is_read_exactly(bound):
            name = f"exclusive{name.capitalize()}" if is_open and not name.startswith("exclusive") else name
        else:
            name = "minimum" if is_low else "maximum"
            bound = _digits_above(bound, is_open) if is_low else -_digits_above(-bound, is_open)
        exact[name] = bound if name not in exact else (max if is_low else min)(bound, exact[name])
    return exact


def _digits_above(bound: int | float, is_open: bool) -> float:
    """Return a double above a bound, also if its shortest digits are read, as llguidance does."""
    if abs(bound) < _EXACT:
        return _shortened(bound)
    found = float(_double_above(bound))
    while (digits := Decimal(repr(found))) < bound or (is_open and digits == bound):
        found = math.nextafter(found, math.inf)
    # As JSON, integers are read exactly, floats up to their last digit.
    return int(found) if math.isfinite(found) else found


def _shortened(bound: int | float) -> float:
    """Return the next number above a bound that llguidance reads exactly."""
    with localcontext(prec=400, rounding=ROUND_CEILING) as context:
        found = Decimal(repr(bound)).quantize(Decimal(10) ** -_NUM_PLACES)
        context.prec = _NUM_DIGITS
        return float(+found)


def _double_above(bound: int | float) -> Any:
    """Return the smallest double that is not below a bound, and within llguidance's range if it can be."""
    if bound <= _FIRST:
        return _FIRST
    if bound > _LAST:
        return math.inf
    double = float(bound)
    if double < bound:
        double = math.nextafter(double, math.inf)
    return int(double) if isinstance(bound, int) or abs(double) > _EXACT else double
