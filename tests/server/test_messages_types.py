"""The request types of Anthropic's own package, walked: no field of theirs is unknown to /v1/messages.

Each is honoured, left out by the table, or refused by its name or its type's.
"""

import importlib
import json
import types
from collections.abc import Iterator
from typing import Any, Literal, Required, Union, get_args, get_origin, get_type_hints

import pytest
from typing_extensions import is_typeddict

from octavo.server.api.anthropic.messages_input import parse_messages
from octavo.server.api.anthropic.messages_structs import CountRequest, MessagesRequest
from octavo.server.api.body import decode
from octavo.server.api_errors import ApiError

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


def unnamed(body: dict[str, Any], kind: type[CountRequest]) -> str | None:
    """Return the error of a body that says no more than that a field is unknown."""
    try:
        if kind is CountRequest:
            decode(json.dumps(body).encode(), kind)
        else:
            parse_messages(json.dumps(body).encode(), {})
    except ApiError as error:
        return str(error) if "unknown field" in str(error) else None
    return None


@pytest.mark.parametrize("package", ["anthropic.types", "anthropic.types.beta"])
def test_no_field_of_the_package_is_unknown(package: str) -> None:
    creates = importlib.import_module(f"{package}.message_create_params")
    bodies = samples(creates.MessageCreateParamsNonStreaming) + samples(creates.MessageCreateParamsStreaming)
    assert len(bodies) > 1000
    assert {error for body in bodies if (error := unnamed(body, MessagesRequest))} == set()
    counts = importlib.import_module(f"{package}.message_count_tokens_params")
    bodies = samples(counts.MessageCountTokensParams)
    assert {error for body in bodies if (error := unnamed(body, CountRequest))} == set()
