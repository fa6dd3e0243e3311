"""Schemas come in by many ways; every one of them is held to the letter, or refused with the place."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from http_helpers import LiveServer

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "password": {"type": "string", "format": "password", "maxLength": 4},
        "size": {"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 9},
        "form": {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]},
        "quoted": {"type": "string", "pattern": '^[^"]{1,3}$'},
    },
    "required": ["password", "size", "form", "quoted"],
    "additionalProperties": False,
    "$defs": {"a": {"type": "string", "format": "json-pointer"}},
}
LOOKING = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}


def function(schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": "note", "parameters": schema, "strict": True}


def ways(schema: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return bodies by the way a schema takes."""
    named = {"type": "function", "function": {"name": "note"}}
    chat = {"messages": HELLO, "max_tokens": 150, "seed": 1}
    tool = {"type": "function", "function": function(schema)}
    form = {"type": "json_schema", "name": "a", "schema": schema}
    return {
        "response_format": (
            "/v1/chat/completions",
            {
                **chat,
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            },
        ),
        "structured_outputs": ("/v1/chat/completions", {**chat, "structured_outputs": {"json": schema}}),
        "text of completions": (
            "/v1/completions",
            {
                "prompt": "Hi",
                "max_tokens": 150,
                "seed": 1,
                "structured_outputs": {"json": json.dumps(schema)},
            },
        ),
        "text.format": ("/v1/responses", {"input": "Hi", "max_output_tokens": 150, "text": {"format": form}}),
        "named tool": ("/v1/chat/completions", {**chat, "tools": [tool], "tool_choice": named}),
        "tool of responses": (
            "/v1/responses",
            {
                "input": "Hi",
                "max_output_tokens": 150,
                "tools": [{"type": "function", **function(schema)}],
                "tool_choice": "required",
            },
        ),
        "tool of messages": (
            "/v1/messages",
            {
                "messages": HELLO,
                "max_tokens": 150,
                "tools": [{"name": "note", "input_schema": schema, "strict": True}],
                "tool_choice": {"type": "any"},
            },
        ),
    }


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize("way", ways(SCHEMA))
def test_a_schema_is_taken_by_every_way(
    serve_template: Callable[..., LiveServer], way: str, parser: str
) -> None:
    server, (path, body) = serve_template(tool_call_parser=parser), ways(SCHEMA)[way]
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("way", ways(LOOKING))
def test_what_cannot_be_held_to_is_refused_with_its_place(
    serve_template: Callable[..., LiveServer], way: str
) -> None:
    server, (path, body) = serve_template(tool_call_parser="hermes"), ways(LOOKING)[way]
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400
    assert "properties.a: the pattern '(?=a)b' cannot be held to" in answer.json()["error"]["message"]
