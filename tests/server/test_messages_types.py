"""The request types of Anthropic's own package, walked: no field of theirs is unknown to /v1/messages.

Each is honoured, left out by the table, or refused by its name or its type's.
"""

import importlib
import json
from typing import Any

import pytest
from typed_samples import samples

from octavo.server.api.anthropic.messages_input import parse_messages
from octavo.server.api.anthropic.messages_structs import CountRequest, MessagesRequest
from octavo.server.api.body import decode
from octavo.server.api_errors import ApiError


def error_of(body: dict[str, Any], kind: type[CountRequest] | type[MessagesRequest]) -> str:
    """Return what is refused of a body; empty: nothing."""
    try:
        if kind is CountRequest:
            decode(json.dumps(body).encode(), kind)
        else:
            parse_messages(json.dumps(body).encode(), {})
    except ApiError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("package", ["anthropic.types", "anthropic.types.beta"])
def test_no_field_of_the_package_is_unknown(package: str) -> None:
    creates = importlib.import_module(f"{package}.message_create_params")
    counts = importlib.import_module(f"{package}.message_count_tokens_params")
    for found, kind in (
        (creates.MessageCreateParamsNonStreaming, MessagesRequest),
        (creates.MessageCreateParamsStreaming, MessagesRequest),
        (counts.MessageCountTokensParams, CountRequest),
    ):
        errors = [error_of(body, kind) for body in samples(found)]
        assert errors.count("") > 500, "the samples are not what the package means"
        assert {error for error in errors if "unknown field" in error} == set()


def test_a_field_that_nobody_names_would_be_found() -> None:
    turn = {"role": "user", "content": [{"type": "text", "text": "Hi", "tone": "kind"}]}
    assert "unknown field `tone`" in error_of({"messages": [turn], "max_tokens": 1}, MessagesRequest)
    turn = {"role": "user", "content": "Hi", "tone": "kind"}
    assert "unknown field 'tone'" in error_of({"messages": [turn], "max_tokens": 1}, MessagesRequest)
