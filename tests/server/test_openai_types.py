"""No field of the openai package's requests is unnamed: each is honoured, left out by the table, or refused by name."""

import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NotRequired, Required, get_args, get_origin

import pytest
import typing_extensions
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from octavo.errors import OctavoError
from octavo.server.api.responses.response_input import parse_response
from octavo.server.api.toolbox import toolbox_of
from octavo.server.api_errors import ApiError, as_api_error
from octavo.server.parsing.call_formats import hermes
from octavo.server.parsing.formats import ModelFormats
from octavo.server.reading.requests import parse_chat, parse_completion
from octavo.tokenizer.messages import checked_messages

TURN = {"role": "user", "content": "Hi"}
ROUTES: dict[str, tuple[Callable[..., Any], dict[str, Any], type]] = {
    "responses": (parse_response, {"input": "Hi"}, response_create_params.ResponseCreateParamsNonStreaming),
    "chat": (parse_chat, {"messages": [TURN]}, chat_create_params.CompletionCreateParamsNonStreaming),
    "completions": (
        parse_completion,
        {"prompt": "Hi"},
        completion_create_params.CompletionCreateParamsNonStreaming,
    ),
}
# Objects of these are JSON of the client's own.
OPAQUE = {"metadata", "logit_bias", "parameters", "schema", "client_metadata", "output_schema", "arguments"}
MAX_DEPTH = 5
FORMATS = ModelFormats(hermes(), "", None, shows_tools=True)
REQUIRED = (Required, typing_extensions.Required)


def is_typed_dict(kind: object) -> bool:
    return isinstance(kind, type) and hasattr(kind, "__required_keys__")


def variants(kind: Any) -> list[Any]:
    """The types that a type may be, without None, and what lists and optional fields hold."""
    origin = get_origin(kind)
    if origin in (
        Required,
        NotRequired,
        typing_extensions.Required,
        typing_extensions.NotRequired,
        typing.Annotated,
    ):
        return variants(get_args(kind)[0])
    if origin in (typing.Union, types.UnionType):
        return [one for part in get_args(kind) if part is not type(None) for one in variants(part)]
    return [kind]


def items_of(kind: Any) -> list[Any]:
    origin = get_origin(kind)
    is_list = isinstance(origin, type) and issubclass(origin, Iterable) and origin is not dict
    return variants(get_args(kind)[0]) if is_list else []


def hints_of(kind: Any) -> dict[str, Any]:
    return typing_extensions.get_type_hints(kind, include_extras=True)


def sample(kind: Any) -> Any:
    """A value of a type."""
    kind = variants(kind)[0]
    origin = get_origin(kind)
    if origin in (Literal, typing_extensions.Literal):
        return get_args(kind)[0]
    if is_typed_dict(kind):
        return {name: sample(hint) for name, hint in hints_of(kind).items() if get_origin(hint) in REQUIRED}
    if items_of(kind):
        return [sample(items_of(kind)[0])]
    return {str: "x", int: 1, float: 0.5, bool: True}.get(kind, {})


def cases(kind: type, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every path in a type, with a value for what it leads to: objects hold what is required, and the next step."""
    for name, hint in hints_of(kind).items():
        for one in variants(hint):
            listed = items_of(one)
            for inner in listed or [one]:
                wrap = (lambda value: [value]) if listed else (lambda value: value)
                if not is_typed_dict(inner):
                    yield (*path, name), {name: wrap(sample(inner))}
                elif len(path) < MAX_DEPTH and name not in OPAQUE:
                    base = sample(inner)
                    yield (*path, name), {name: wrap(base)}
                    for further, value in cases(inner, (*path, name)):
                        yield further, {name: wrap({**base, **value})}


def judge(api: str, value: dict[str, Any]) -> str:
    """What becomes of a body: "" if it is taken, else why not."""
    parse, least, _ = ROUTES[api]
    try:
        found = parse(json.dumps({**least, **value}).encode(), {})
        if api != "completions":
            checked_messages(found.chat.messages)
            toolbox_of(found.chat, FORMATS, None)
    except (ApiError, OctavoError) as error:
        detail = as_api_error(error).detail
        return f"{detail.code}: {detail.message}"
    return ""


@pytest.mark.parametrize("api", ROUTES)
def test_every_field_of_the_package_is_named(api: str) -> None:
    unnamed, count = [], 0
    for path, value in cases(ROUTES[api][2]):
        count += 1
        why = judge(api, value)
        if (
            why.startswith(("unknown_field", "None: unknown"))
            or "unknown field" in why
            or "unknown key" in why
        ):
            unnamed.append(f"{'.'.join(path)}: {why} {json.dumps(value)[:200]}")
    assert count > 20
    assert not unnamed, "\n".join(sorted(set(unnamed)))
