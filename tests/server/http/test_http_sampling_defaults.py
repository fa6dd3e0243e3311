"""The model's own defaults of sampling over HTTP: where a request is silent, in every API."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from http_helpers import LiveServer
from tiny_chat import write_model

from octavo.server.reading.processes import LONG_BYTES

HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 12, "seed": 1},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 12, "seed": 1},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 12},
    "/v1/messages": {"messages": HELLO, "max_tokens": 12},
}
# Anthropic's and the responses' API have no field for a penalty.
DEFAULTS = {"temperature": 0.0, "top_p": 0.5}


@pytest.fixture
def serve(tmp_path: Path, serve_tiny: Callable[..., LiveServer]) -> Callable[..., LiveServer]:
    """Serve the tiny model with defaults of its own."""

    def serve(defaults: dict[str, Any] = DEFAULTS, **engine: Any) -> LiveServer:
        folder = write_model(tmp_path)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **defaults}))
        return serve_tiny({"model": str(folder), **engine})

    return serve


def text_of(server: LiveServer, path: str, **fields: Any) -> str:
    body = json.dumps({**BODIES[path], **fields}) + fields.pop("padding", "")
    answer = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    if "choices" in found:
        (choice,) = found["choices"]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    parts = found["content"] if "content" in found else found["output"][0]["content"]
    return "".join(part["text"] for part in parts)


@pytest.mark.parametrize("path", BODIES)
def test_they_hold_where_a_request_is_silent(serve: Callable[..., LiveServer], path: str) -> None:
    server = serve()
    own = text_of(server, path)
    assert own == text_of(server, path, **DEFAULTS) == text_of(server, path, temperature=None)
    assert own == text_of(server, path, top_p=1.0, temperature=0)


@pytest.mark.parametrize("path", BODIES)
def test_a_value_of_the_request_comes_first_a_neutral_one_too(
    serve: Callable[..., LiveServer], path: str
) -> None:
    server = serve({"temperature": 0.0})
    own = text_of(server, path)
    others = {text_of(server, path, temperature=1.0, top_p=1.0) for _ in range(6)}
    assert others != {own}, "1.0 is what it says"


@pytest.mark.parametrize("path", BODIES)
def test_long_bodies_get_them_too(serve: Callable[..., LiveServer], path: str) -> None:
    server = serve()
    content = json.dumps(BODIES[path]) + " " * LONG_BYTES
    answers = [
        server.http.post(path, content=body, headers={"Content-Type": "application/json"}).json()
        for body in (content, json.dumps({**BODIES[path], **DEFAULTS}))
    ]
    shown = [
        answer.get("choices") or answer.get("content") or answer["output"][0]["content"] for answer in answers
    ]
    assert shown[0] == shown[1]


def test_a_response_says_what_was_taken(serve: Callable[..., LiveServer]) -> None:
    server = serve({"temperature": 0.25, "top_p": 0.5})
    answer = server.http.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 1}).json()
    assert (answer["temperature"], answer["top_p"]) == (0.25, 0.5)
    given = {"input": "Hello", "max_output_tokens": 1, "temperature": 1.0}
    answer = server.http.post("/v1/responses", json=given).json()
    assert (answer["temperature"], answer["top_p"]) == (1.0, 0.5)


def test_the_list_of_models_says_what_they_are(serve: Callable[..., LiveServer]) -> None:
    server = serve({"top_k": 5, "repetition_penalty": 1.1})
    for card in (server.http.get("/v1/models").json()["data"][0], server.http.get("/v1/models/tiny").json()):
        assert card["default_sampling_params"] == {"top_k": 5, "repetition_penalty": 1.1}
        assert card["generation_config"] == "generation_config.json"


def test_none_are_taken_if_none_are_asked_for(serve: Callable[..., LiveServer]) -> None:
    server = serve(generation_config="none")
    card = server.http.get("/v1/models").json()["data"][0]
    assert (card["default_sampling_params"], card["generation_config"]) == ({}, None)
    answer = server.http.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 1}).json()
    assert (answer["temperature"], answer["top_p"]) == (1.0, 1.0)
