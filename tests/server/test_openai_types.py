"""The openai package's request types, walked: no field of theirs is unnamed.

Each is honoured, left out by the table, or refused by its name or its type's.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from typed_samples import samples

from octavo.errors import OctavoError
from octavo.server.api.responses.response_input import parse_response
from octavo.server.api.tools.toolbox import toolbox_of
from octavo.server.api_errors import ApiError
from octavo.server.parsing.call_formats import hermes
from octavo.server.parsing.formats import ModelFormats
from octavo.server.reading.requests import parse_chat, parse_completion
from octavo.tokenizer.messages import checked_messages

TURN = {"role": "user", "content": "Hi"}
FORMATS = ModelFormats(hermes(), "", None, shows_tools=True)
ROUTES: dict[str, tuple[Callable[..., Any], dict[str, Any], type, int]] = {
    "responses": (
        parse_response,
        {"input": "Hi"},
        response_create_params.ResponseCreateParamsNonStreaming,
        500,
    ),
    "chat": (parse_chat, {"messages": [TURN]}, chat_create_params.CompletionCreateParamsNonStreaming, 80),
    "completions": (
        parse_completion,
        {"prompt": "Hi"},
        completion_create_params.CompletionCreateParamsNonStreaming,
        15,
    ),
}


def judge(api: str, value: dict[str, Any]) -> str:
    """What becomes of a body: "" if it is taken, else why not."""
    parse, least, _, _ = ROUTES[api]
    try:
        found = parse(json.dumps({**least, **value}).encode(), {})
        if api != "completions":
            checked_messages(found.chat.messages)
            toolbox_of(found.chat, FORMATS, None)
    except (ApiError, OctavoError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("api", ROUTES)
def test_no_field_of_the_package_is_unnamed(api: str) -> None:
    bodies = samples(ROUTES[api][2])
    assert len(bodies) >= ROUTES[api][3]
    found = {judge(api, body): body for body in bodies}
    unnamed = [f"{why}: {str(body)[:300]}" for why, body in found.items() if "unknown" in why]
    assert unnamed == []
