"""Values of types that a package writes as TypedDicts: with each field of each of them at least once."""

import types
from collections.abc import Iterator
from typing import Any, Literal, Required, Union, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict

PLAIN: dict[type, Any] = {str: "x", int: 7, float: 0.5, bool: True, object: "x"}


def samples(hint: Any, seen: tuple[type, ...] = ()) -> list[Any]:
    """Return values of a type: at least one with each field of each TypedDict within it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_typeddict(hint):
        return [] if hint in seen else list(objects(hint, (*seen, hint)))
    if origin is Literal:
        return [arguments[0]]
    if origin in (Union, types.UnionType):
        return [value for kind in arguments if kind is not type(None) for value in samples(kind, seen)]
    if hint in PLAIN:
        return [PLAIN[hint]]
    if hint is Any:
        return ["x"]
    if (isinstance(origin, type) and issubclass(origin, dict)) or origin in (dict,):
        return [{"type": "object"}]
    if arguments:  # lists of all kinds
        return [[value] for value in samples(arguments[0], seen) if not isinstance(value, list)]
    return [{}] if hint is dict else []


def objects(hint: Any, seen: tuple[type, ...]) -> Iterator[dict[str, Any]]:
    hints = get_type_hints(hint, include_extras=True)
    required = {name for name, kind in hints.items() if get_origin(kind) is Required}
    found = {name: samples(kind, seen) for name, kind in get_type_hints(hint).items()}
    base = {name: found[name][0] for name in found if name in required and found[name]}
    yield base
    for name, values in found.items():
        for value in values:
            yield {**base, name: value}
