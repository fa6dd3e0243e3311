"""200 adversarial texts in calls of all formats, cut in two at every place: streamed is whole."""

import json

import pytest
from test_tool_calls import ADVERSARIAL

from octavo.server.parsing.answer import AnswerReader, ReasoningReader
from octavo.server.parsing.call_formats import (
    GEMMA4,
    GLM45,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MISTRAL_LIST,
    QWEN3_CODER,
    CallFormat,
    hermes,
)

FORMATS = {
    "hermes": hermes(), "qwen3_coder": QWEN3_CODER, "llama3_json": LLAMA, "mistral": MISTRAL,
    "mistral-list": MISTRAL_LIST, "glm45": GLM45, "minimax": MINIMAX, "gemma4": GEMMA4,
}  # fmt: skip
SCHEMA = {"properties": {"cmd": {"type": "string"}, "list": {"type": "array"}}}


def outcome(form: CallFormat, chunks: list[str]) -> tuple[str, str, list[list[str]]]:
    reasoning = ReasoningReader("<think>", "</think>", has_begun=True)
    reader = AnswerReader(reasoning, form.reader([("f", SCHEMA)]))
    pieces = [piece for chunk in chunks for piece in reader.feed(chunk)] + reader.finish()
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.kind == "call":
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            calls[-1][1] += piece.text
    texts = ["".join(p.text for p in pieces if p.kind == kind) for kind in ("reasoning", "content")]
    return texts[0], texts[1], calls


@pytest.mark.parametrize("step", [37, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_cut_anywhere_is_the_whole_call(name: str, step: int) -> None:
    form = FORMATS[name]
    for number, text in enumerate(ADVERSARIAL):
        arguments = {"cmd": text, "list": [text, {"x": text}]}
        written = f"Hm.</think>{form.written([('f', arguments)])}"
        expected = ("Hm.", "", [["f", json.dumps(arguments, ensure_ascii=False)]])
        assert outcome(form, [written]) == expected
        for cut in range(1 + number % step, len(written), step):
            assert outcome(form, [written[:cut], written[cut:]]) == expected
