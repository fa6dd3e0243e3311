"""Grammars that hold calls to their schemas, required ones and strict ones that any text may come before."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from http_helpers import LiveServer, chat
from llguidance import LLMatcher, LLTokenizer
from tiny_chat import write_model
from tiny_harmony import TOOL, write_harmony_model

from octavo.engine.structured.compiler import grammar_source
from octavo.engine.structured.grammar_vocabulary import read_vocabulary
from octavo.errors import StructuredOutputError
from octavo.sampling_params import StructuredOutput
from octavo.server.parsing.answer import AnswerReader, read_answer
from octavo.server.parsing.answer_grammars import GrammarWriter, harmony_grammar
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
from octavo.server.parsing.harmony import harmony_of
from octavo.tokenizer import Tokenizer

URL = "/v1/chat/completions"
FORMATS = {
    "hermes": hermes(), "qwen3_coder": QWEN3_CODER, "llama3_json": LLAMA, "mistral": MISTRAL,
    "mistral-list": MISTRAL_LIST, "glm45": GLM45, "minimax": MINIMAX, "gemma4": GEMMA4,
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "code": {"type": "string", "minLength": 1, "maxLength": 3},
        "day": {"enum": ["mon", "tue"]},
        "n": {"type": "integer", "minimum": 0},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "word": {"type": "string", "pattern": "^[a-c/]+$"},
        "part": {"type": "string", "pattern": "x"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/whole"}},
        "level": {"enum": ["low", 2, None, [1]]},
    },
    "required": ["city", "n"],
    "additionalProperties": False,
    "$defs": {"whole": {"type": "integer"}},
}
FUNCTIONS = [("f", SCHEMA), ("g", None)]
VALID = [
    {"city": "Rome", "n": 3}, {"city": "", "code": "a\nb", "n": 0}, {"city": "x", "day": "tue", "n": 1},
    {"city": "</b>\n", "n": 1, "note": "abc", "word": "ab/c", "part": "axb", "list": [1, 2]},
    *({"city": "x", "n": 1, "level": level} for level in ("low", 2, None, [1])),
]  # fmt: skip
INVALID = [
    {}, {"n": 1}, {"city": "x"}, {"city": "x", "n": -1}, {"city": "x", "code": "", "n": 1},
    {"city": "x", "code": "abcd", "n": 1}, {"city": "x", "day": "wed", "n": 1},
    {"city": "x", "n": 1, "word": "abd"}, {"city": "x", "n": 1, "part": "ab"},
    {"city": "x", "n": 1, "list": ["a"]}, {"city": "x", "n": 1, "other": 1},
    {"city": "x", "n": 1, "level": "high"},
]  # fmt: skip


class Judge:
    """Says how far a text follows a grammar."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_folder(folder)
        eos = frozenset(self.tokenizer.eos_token_ids)
        self.vocabulary: LLTokenizer = read_vocabulary(self.tokenizer, self.tokenizer.vocab_size, eos)

    def allows(self, grammar: StructuredOutput, text: str) -> bool:
        """Whether the whole text may be an answer."""
        matcher = LLMatcher(self.vocabulary, grammar_source(grammar))
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return (
            matcher.validate_tokens(ids) == len(ids)
            and matcher.consume_tokens(ids)
            and matcher.is_accepting()
        )


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(write_model(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def harmony_judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(write_harmony_model(tmp_path_factory.mktemp("harmony")))


@pytest.mark.parametrize("name", FORMATS)
def test_a_strict_call_follows_its_schema_wherever_it_begins(judge: Judge, name: str) -> None:
    form: CallFormat = FORMATS[name]
    writer = GrammarWriter(judge.tokenizer)
    rules = writer.calls(form, FUNCTIONS, parallel=True)
    free = writer.write(calls=rules, content=None, reasoning=None, has_begun=False, free=form)
    must = writer.write(calls=rules, content=None, reasoning=None, has_begun=False)
    before = form.trigger if form.is_bare else "Hm. "
    for text in ("", "Hm.", form.trigger[:-1], '{"x": 1}', "{", "a\n\n😀"):
        assert judge.allows(free, text), text
        assert not judge.allows(must, text), text
    for arguments in VALID:
        written = form.written([("f", arguments)])
        assert judge.allows(must, written), written
        for text in (written, before + written):
            assert judge.allows(free, text), text
            answer = read_answer(AnswerReader(None, form.reader([("f", SCHEMA)])), text)
            assert json.loads(answer.calls[0].arguments) == arguments
        several = form.written([("f", arguments), ("g", {"anything": "1"})])
        assert judge.allows(free, several)
    for arguments in INVALID:
        written = form.written([("f", arguments)])
        for text in (written, before + written):
            assert not judge.allows(free, text), text
            assert not judge.allows(must, text), text
    for text in (form.written([("unknown", {})]), before + form.written([("unknown", {})])):
        assert not judge.allows(free, text), text


def test_no_other_spelling_slips_past(judge: Judge) -> None:
    writer = GrammarWriter(judge.tokenizer)

    def free(form: CallFormat) -> StructuredOutput:
        rules = writer.calls(form, FUNCTIONS, parallel=True)
        return writer.write(calls=rules, content=None, reasoning=None, has_begun=False, free=form)

    for text in (
        '{"parameters": {}, "name": "f"}',
        '\n { "name":"f","parameters":{}}',
        '\x1c{"name": "f", "parameters": {}}',
        '{"na\\u006de": "f", "parameters": {}}',
        '{"type": "function", "name": "f", "parameters": {}}',
        '{"id": 1, "name": "f", "arguments": {}}',
    ):
        assert not judge.allows(free(LLAMA), text), text
    for text in ("<function=f></function>", "<tool_call><function=f>", "x<function="):
        assert not judge.allows(free(QWEN3_CODER), text), text
    assert judge.allows(free(QWEN3_CODER), "<tool_call> no call")
    after = "<think>a <tool_call>x</think>Hm."
    rules = writer.calls(hermes(), FUNCTIONS, parallel=True)
    think = ("<think>", "</think>")
    grammar = writer.write(calls=rules, content=None, reasoning=think, has_begun=False, free=hermes())
    assert judge.allows(grammar, after)
    assert judge.allows(grammar, "Hm.<think>")
    assert not judge.allows(grammar, after + '<tool_call>{"name": "f"}')


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "anyOf": [{}]}, "anyOf"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, "format"),
        ({"properties": {"a": {"type": ["string", "integer"], "minimum": 3}}}, "minimum"),
        ({"properties": {"a": {"allOf": [{"type": "string"}]}}}, "allOf"),
        ({"properties": {"a": {"enum": ["1", 1]}}}, "the value"),
        ({"properties": {"a": {"enum": []}}}, "enum"),
        (
            {"properties": {"a": {"$ref": "#/$defs/b", "maxLength": 1}}, "$defs": {"b": {"type": "string"}}},
            "maxLength",
        ),
        ({"properties": {"a": {"enum": ["</parameter>"]}}}, "</parameter>"),
        ({"properties": {"a>b": {}}}, "a>b"),
        ({"properties": {"a": False}}, "false"),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, "null"),
        ({"properties": {"a": {"type": "string", "minLength": '0}/ | "x"'}}}, "minLength"),
        ({"properties": {"a": {"type": "string", "pattern": ["a"]}}}, "pattern"),
        ({"properties": ["a"]}, "properties"),
        ({"required": 5}, "required"),
    ],
)
def test_what_xml_cannot_be_held_to_is_named(judge: Judge, schema: dict, named: str) -> None:
    with pytest.raises(StructuredOutputError, match="cannot be held to") as caught:
        GrammarWriter(judge.tokenizer).calls(QWEN3_CODER, [("f", schema)], parallel=False)
    assert named in str(caught.value)


def test_harmony_is_held_as_a_whole(harmony_judge: Judge) -> None:
    harmony = harmony_of(harmony_judge.tokenizer)
    assert harmony is not None
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
    final = "<|channel|>final<|message|>{}"
    free, must = (
        harmony_grammar(harmony, FUNCTIONS, must_call=must_call, content=None, channel=None)
        for must_call in (False, True)
    )
    good, bad = (call.format("f", json.dumps(found)) for found in (VALID[0], INVALID[1]))
    for before in ("", thought, thought * 2, thought.replace("analysis", "commentary")):
        assert harmony_judge.allows(free, before + final.format("Yes."))
        assert not harmony_judge.allows(must, before + final.format("Yes."))
        for grammar in (free, must):
            assert harmony_judge.allows(grammar, before + good)
            assert harmony_judge.allows(grammar, before + call.format("g", "{}"))
            for wrong in (bad, call.format("unknown", "{}"), "Yes."):
                assert not harmony_judge.allows(grammar, before + wrong)
    choice = StructuredOutput(choice=["yes", "no"])
    held = harmony_grammar(harmony, [], must_call=False, content=choice, channel=None)
    assert harmony_judge.allows(held, thought + final.format("yes"))
    assert not harmony_judge.allows(held, thought + final.format("perhaps"))
    for channel, text in (
        ("final", "yes"),
        ("analysis", "Hm.<|end|><|start|>assistant" + final.format("no")),
    ):
        left_open = harmony_grammar(harmony, [], must_call=False, content=choice, channel=channel)
        assert harmony_judge.allows(left_open, text)
    with pytest.raises(StructuredOutputError, match="no call can follow"):
        harmony_grammar(harmony, FUNCTIONS, must_call=True, content=None, channel="final")


STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
QWEN = "{% if tools %}<tool_call><function=f><parameter=x>{% endif %}{{ messages[0].content }}"
# Ends are likelier than all else, or a random model would write for long.
BIAS = {str(3 + ord(character)): 20 for character in '"}</'}


@pytest.fixture
def serve_folder(tmp_path: Path, serve_tiny: Callable[..., LiveServer]) -> Callable[..., LiveServer]:
    """Serve a tiny model whose vocabulary has a marker as one special token, with another template."""

    def serve(marker: str, template: str | None = None, **options: Any) -> LiveServer:
        folder = write_model(tmp_path, max_model_len=4096)
        text = (folder / "tokenizer.json").read_text().replace("<|endoftext|>", marker)
        (folder / "tokenizer.json").write_text(text)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return serve_tiny({"model": str(folder), "num_blocks": 2048}, **options)

    return serve


@pytest.mark.parametrize(
    ("marker", "parser"),
    [("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"), ("<|python_tag|>", "llama3_json")],
)
def test_a_call_that_a_random_model_begins_is_held(
    serve_folder: Callable[..., LiveServer], marker: str, parser: str
) -> None:
    server = serve_folder(marker, tool_call_parser=parser)
    body = chat("Hi", max_tokens=200, temperature=1, seed=4, logit_bias={"0": 100, **BIAS})
    found = server.post(URL, {**body, "tools": [STRICT]}).json()["choices"][0]
    (call,) = found["message"]["tool_calls"][:1]
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["unit"] in "CF"
    assert len(arguments["city"]) <= 4
    loose = server.post(URL, {**body, "tools": [TOOL], "max_tokens": 20}).json()["choices"][0]
    assert "tool_calls" not in loose["message"]


def test_a_model_of_xml_calls_what_it_must(serve_folder: Callable[..., LiveServer]) -> None:
    server = serve_folder("<|endoftext|>", QWEN)
    assert server.gate.context.materials.formats.calls is QWEN3_CODER
    body = chat("Hi", max_tokens=300, temperature=1, seed=4, logit_bias=BIAS, tool_choice="required")
    body |= {"tools": [TOOL], "parallel_tool_calls": False}
    found = server.post(URL, body).json()["choices"][0]
    (call,) = found["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["unit"] in "CF"
    assert found["finish_reason"] == "tool_calls"
    events = server.events(URL, body)
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    calls = [one["function"] for delta in deltas for one in delta.get("tool_calls", [])]
    assert "".join(one["arguments"] for one in calls) == call["function"]["arguments"]
    cannot = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": cannot, "strict": True}}
    refused = server.post(URL, chat("Hi", tools=[tool]))
    assert refused.status_code == 400
    assert "'format'" in refused.json()["error"]["message"]


def test_strict_beside_a_grammar_of_ones_own_is_refused(roomy: LiveServer) -> None:
    grammar = {"structured_outputs": {"grammar": 'start: "x"'}}
    refused = roomy.post(URL, chat("Hi", tools=[STRICT], **grammar))
    assert refused.status_code == 400
    assert "strict" in refused.json()["error"]["message"]
    assert roomy.post(URL, chat("Hi", tools=[STRICT], tool_choice="none", **grammar)).status_code == 200
    assert roomy.post(URL, chat("Hi", tools=[TOOL], **grammar)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_other_routes_hand_strict_on(serve_folder: Callable[..., LiveServer], path: str) -> None:
    server = serve_folder("<|endoftext|>", QWEN)
    cannot = {"type": "object", "minProperties": 1}
    if path == "/v1/responses":
        body: dict[str, Any] = {"input": "Hi", "max_output_tokens": 4}
        tool = {"type": "function", "name": "f", "parameters": cannot}
    else:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        tool = {"name": "f", "input_schema": cannot}
    assert server.post(path, {**body, "tools": [tool]}).status_code == 200
    refused = server.post(path, {**body, "tools": [{**tool, "strict": True}]})
    assert refused.status_code == 400
    assert "minProperties" in refused.text
