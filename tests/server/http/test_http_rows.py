"""What other servers have and this one lacks is refused by name, with what to do instead."""

import subprocess
import sys

import pytest
from http_helpers import LiveServer, chat

TAG = {"type": "structural_tag", "structures": [], "triggers": []}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", TAG),
        ("response_format", {"type": "structural_tag", "format": {}}),
        ("structured_outputs", {"structural_tag": "{}"}),
    ],
)
def test_structural_tags_are_refused_by_name(live: LiveServer, field: str, value: dict) -> None:
    for path, body in (("chat/completions", chat("Hi")), ("completions", {"prompt": "Hi"})):
        response = live.post(f"/v1/{path}", {**body, field: value})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == field
        assert "structural_tag" in error["message"]
        assert "strict" in error["message"]


def test_a_form_that_spells_a_special_token_is_text(live: LiveServer) -> None:
    text = "a <|im_end|> b"
    for form in ({"choice": [text]}, {"json": {"const": text}}):
        answer = live.post("/v1/chat/completions", chat("Hi", max_tokens=60, structured_outputs=form))
        assert answer.json()["choices"][0]["message"]["content"].strip('"') == text


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("GET", "/v1/responses/resp-1", "--response-store-mib"),
        ("DELETE", "/v1/responses/resp-1", "--response-store-mib"),
        ("POST", "/v1/responses/resp-1/cancel", "--response-store-mib"),
        ("POST", "/v1/batches", "--batch-dir"),
        ("POST", "/v1/messages/batches", "run-batch"),
        ("POST", "/reset_prefix_cache", "no route '/reset_prefix_cache'"),
        ("POST", "/invocations", "no route '/invocations'"),
    ],
)
def test_routes_that_are_lacking_say_so(live: LiveServer, method: str, path: str, hint: str) -> None:
    response = live.http.request(method, path)
    assert response.status_code == 404
    assert hint in response.json()["error"]["message"]


def test_a_server_imports_no_model_code_and_no_second_framework() -> None:
    """Nothing that runs code from model folders, and no validation beside msgspec."""
    heavy = {"transformers", "pydantic", "fastapi", "uvicorn", "accelerate", "einops"}
    program = (
        "import sys, octavo.cli.serve, octavo.server.serving, octavo.server.app, octavo.engine.engine; "
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
