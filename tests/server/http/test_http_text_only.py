"""A request with an image, a sound or a file is refused with the names of the model and of the part."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from http_helpers import LiveServer, chat
from tiny_chat import write_model

URL = "http://192.0.2.1/a.png"
# Route, body without the messages' field, the field, parts, and where the part stands in what is said.
OPENAI = [
    {"type": "image_url", "image_url": {"url": URL}},
    {"type": "input_audio", "input_audio": {"data": "aaaa", "format": "wav"}},
    {"type": "video_url", "video_url": {"url": URL}},
    {"type": "file", "file": {"file_id": "a"}},
]
RESPONSES = [{"type": "input_image", "image_url": URL}, {"type": "input_file", "file_id": "a"}]
ANTHROPIC = [
    {"type": "image", "source": {"type": "url", "url": URL}},
    {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aaaa"}},
]
TEXT = {"type": "text", "text": "What is this?"}


def said(part: dict[str, Any], text: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [text, part]}]


CASES: list[tuple[str, dict[str, Any], str, str]] = [
    *(
        ("/v1/chat/completions", {"messages": said(part, TEXT)}, "messages[0].content[1]", part["type"])
        for part in OPENAI
    ),
    ("/tokenize", {"messages": said(OPENAI[0], TEXT)}, "messages[0].content[1]", "image_url"),
    *(
        (
            "/v1/responses",
            {"input": said(part, TEXT | {"type": "input_text"})},
            "input[0].content[1]",
            part["type"],
        )
        for part in RESPONSES
    ),
    *(
        ("/v1/messages", {"messages": said(part, TEXT), "max_tokens": 4}, "messages[0].content[1]", kind)
        for part, kind in zip(ANTHROPIC, ("image", "base64"), strict=True)
    ),
    ("/v1/messages/count_tokens", {"messages": said(ANTHROPIC[0], TEXT)}, "messages[0].content[1]", "image"),
    (
        "/api/chat",
        {"model": "tiny", "messages": [{"role": "user", "content": "What?", "images": ["aaaa"]}]},
        "messages[0].images",
        "images",
    ),
    ("/api/generate", {"prompt": "What?", "images": ["aaaa"]}, "images", "images"),
]


@pytest.mark.parametrize(("path", "body", "place", "kind"), CASES)
@pytest.mark.parametrize("streams", [False, True])
def test_the_model_and_the_part_are_named(
    live: LiveServer, path: str, body: dict[str, Any], place: str, kind: str, streams: bool
) -> None:
    if streams and path not in ("/tokenize", "/v1/messages/count_tokens"):
        body = body | {"stream": True}
    (model,) = (each["id"] for each in live.http.get("/v1/models").json()["data"])
    answer = live.post(path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"the model {model!r} reads text only: {place}")
    assert kind in message
    if not isinstance(error, str):
        assert error["type"] == "invalid_request_error"


def test_a_multimodal_model_answers_texts_and_refuses_images(
    tmp_path: Path, serve_tiny: Callable[..., LiveServer]
) -> None:
    folder = write_model(tmp_path)
    fields = json.loads((folder / "config.json").read_text()) | {"model_type": "llama"}
    whole = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": fields}
    (folder / "config.json").write_text(json.dumps(whole | {"vision_config": {"hidden_size": 32}}))
    server = serve_tiny({"model": str(folder)})
    answer = server.post("/v1/chat/completions", chat("Hi", max_tokens=3, ignore_eos=True))
    assert answer.json()["usage"]["completion_tokens"] == 3
    refused = server.post("/v1/chat/completions", {"messages": said(OPENAI[0], TEXT)})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "text_only")
    assert "'tiny' reads text only: messages[0].content[1]" in refused.json()["error"]["message"]
