"""Which formats a model uses, what its answers are held to, and how tools are told to it."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from octavo.engine.structured.compiler import grammar_source
from octavo.engine.structured.grammar_vocabulary import read_vocabulary
from octavo.errors import UnsupportedModelError
from octavo.sampling_params import StructuredOutput
from octavo.server.parsing.answer import AnswerReader, ReasoningReader, read_answer
from octavo.server.parsing.answer_grammars import GrammarWriter
from octavo.server.parsing.call_formats import described
from octavo.server.parsing.formats import (
    LLAMA,
    MISTRAL,
    MISTRAL_LIST,
    CallFormat,
    formats_of,
    hermes,
    read_response_template,
)
from octavo.tokenizer import Tokenizer

FORMATS = {"hermes": hermes(), "llama": LLAMA, "mistral": MISTRAL, "mistral-list": MISTRAL_LIST}
THINK = ("<think>", "</think>")
QWEN: dict[str, Any] = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"},
    },
}


def tokenizer_with(model_folder: Path, tmp_path: Path, **fields: Any) -> Tokenizer:
    """A tokenizer with other fields in its configuration."""
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    config = json.loads((model_folder / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **fields}))
    return Tokenizer.from_folder(tmp_path)


HERMES_TEMPLATE = "{% if tools %}<tool_call>{'name':, 'arguments':}</tool_call>{% endif %}"


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (HERMES_TEMPLATE, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ("{{ tools }}<|eot_id|>{'name':, \"parameters\":}", '{"name": "f", "parameters": {}}'),
        ("{{ tools }}<|python_tag|>", '{"name": "f", "parameters": {}}'),
        ("{{ tools }}[TOOL_CALLS] [", '[TOOL_CALLS][{"name": "f", "arguments": {}}]'),
        ("{{ tools }}[TOOL_CALLS]name[ARGS]", "[TOOL_CALLS]f[ARGS]{}"),
        ("{{ messages }}", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ("{{ tools }}<tool_call><function=f> arguments", None),
        ("{{ tools }}<tool_call>f<arg_key>arguments", None),
        ("{{ tools }}<tool_call>f<arg_key>k</arg_key><arg_value>", "<tool_call>f\n</tool_call>"),
        (
            "{{ tools }}<minimax:tool_call><invoke name='f'><invoke name=<parameter name=",
            '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>',
        ),
        ("{{ tools }}", None),
    ],
)
def test_a_chat_template_tells_the_format(
    model_folder: Path, tmp_path: Path, template: str, written: str | None
) -> None:
    found = formats_of(tokenizer_with(model_folder, tmp_path, chat_template=template), "auto", "auto")
    assert (found.calls and found.calls.written([("f", {})])) == written
    assert found.shows_tools == ("tools" in template)
    assert written or "--tool-call-parser" in found.why_no_calls


def test_reasoning_is_found_and_options_override(model_folder: Path, tmp_path: Path) -> None:
    plain = tokenizer_with(model_folder, tmp_path)
    assert formats_of(plain, "auto", "auto").reasoning is None
    assert formats_of(plain, "auto", "think").reasoning == THINK
    thinking = tokenizer_with(model_folder, tmp_path, chat_template="{{ messages }}<think></think>")
    assert formats_of(thinking, "auto", "auto").reasoning == THINK
    assert formats_of(thinking, "auto", "none").reasoning is None
    assert formats_of(thinking, "none", "none").calls is None
    assert formats_of(thinking, "llama3_json", "none").calls is LLAMA
    nothing = formats_of(thinking, "response_template", "none")
    assert nothing.calls is None
    assert "has no response_template" in nothing.why_no_calls
    assert formats_of(None, "auto", "auto").reasoning is None


def test_a_response_template_comes_first(model_folder: Path, tmp_path: Path) -> None:
    spec = json.loads(json.dumps(QWEN).replace("tool_call>", "call>").replace("think>", "thought>"))
    found = formats_of(tokenizer_with(model_folder, tmp_path, response_template=spec), "auto", "auto")
    assert found.calls is not None
    assert found.reasoning == ("<thought>", "</thought>")
    text = found.calls.written([("f", {"a": 1})])
    assert text.startswith("<call>")
    assert read_answer(AnswerReader(None, found.calls.new_reader({"f"})), text).calls[0].name == "f"


def changed(path: str, value: Any) -> dict[str, Any]:
    spec = json.loads(json.dumps(QWEN))
    *way, last = path.split(".")
    place = spec
    for key in way:
        place = place[key]
    place[last] = value
    return spec


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 2),
        ("fields", []),
        ("other", 1),
        ("fields.tool_calls.open_pattern", r"<\|tool_call>call:(?P<name>\w+)"),
        ("fields.tool_calls.open_pattern", "(a+)+$"),
        ("fields.tool_calls.close", ["a", "b"]),
        ("fields.tool_calls.content", "xml-inline"),
        ("fields.tool_calls.content_args", {"unquoted_keys": True}),
        ("fields.tool_calls.transform", {"type": "function"}),
        ("fields.tool_calls.repeats", False),
        ("fields.reasoning_content.content", "json"),
        ("fields.reasoning_content.close", ""),
        ("fields.citations", {"open": "<c>", "close": "</c>"}),
        ("fields.content.open", "<answer>"),
    ],
)
def test_what_is_not_supported_in_a_response_template_is_named(path: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="response_template is not supported") as caught:
        read_response_template(changed(path, value))
    assert path.removeprefix("fields.") in str(caught.value) or path.split(".")[-1] in str(caught.value)


def test_a_response_template_divides_as_transformers_does(model_folder: Path, tmp_path: Path) -> None:
    parsing = pytest.importorskip("transformers.utils.chat_parsing.response_parser")
    calls, reasoning = read_response_template(QWEN)
    assert calls is not None
    assert reasoning is not None
    text = (
        "<think>\nHm, <tool_call>?\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "f", "arguments": {"a": "}\\" 😀"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    )
    theirs = parsing.parse_response(text, QWEN, prefix="")
    ours = read_answer(
        AnswerReader(ReasoningReader(*reasoning, has_begun=False), hermes(calls).new_reader({"f"})), text
    )
    assert ours.content == theirs["content"].strip()
    assert ours.reasoning == theirs["reasoning_content"]
    named = [
        {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
        for call in ours.calls
    ]
    assert named == theirs["tool_calls"]


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/short"},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"short": {"type": "string", "maxLength": 5}},
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = [("get_weather", SCHEMA), ("mcp:time.now/v1", NOTHING)]


def sampled(tokenizer: Tokenizer, grammar: StructuredOutput, seed: int, max_tokens: int = 400) -> str | None:
    """A random text of a grammar; None if it did not end."""
    eos = frozenset(tokenizer.eos_token_ids)
    matcher = LLMatcher(read_vocabulary(tokenizer, tokenizer.vocab_size, eos), grammar_source(grammar))
    assert not matcher.is_error(), matcher.get_error()
    draw, ids, mask = random.Random(seed), [], allocate_token_bitmask(1, tokenizer.vocab_size)
    while not matcher.is_stopped() and len(ids) < max_tokens:
        fill_next_token_bitmask(matcher, mask)
        bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
        allowed = np.flatnonzero(bits).tolist()
        # An end or a quote, where one may come, makes texts short.
        likely = [one for one in allowed if one in eos or tokenizer.token_text(one) in ('"', "<", "/", "}")]
        token_id = draw.choice(likely if likely and draw.random() < 0.9 else allowed)
        if token_id in eos:
            break
        matcher.consume_token(token_id)
        ids.append(token_id)
    return tokenizer.decode(ids, skip_special_tokens=False) if len(ids) < max_tokens else None


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_grammar_allows_is_always_a_call(model_folder: Path, name: str) -> None:
    tokenizer, form = Tokenizer.from_folder(model_folder), FORMATS[name]
    writer = GrammarWriter(tokenizer)
    for parallel in (True, False):
        rules = writer.calls(form, FUNCTIONS, parallel=parallel)
        grammar = writer.write(calls=rules, content=None, reasoning=None, has_begun=False)
        texts = [sampled(tokenizer, grammar, seed) for seed in range(6)]
        for text in filter(None, texts):
            answer = read_answer(AnswerReader(None, form.new_reader({name for name, _ in FUNCTIONS})), text)
            assert answer.content == "", text
            assert answer.calls
            assert parallel or len(answer.calls) == 1
            for call in answer.calls:
                found = json.loads(call.arguments)
                assert found == {} if call.name != "get_weather" else len(found["city"]) <= 5
        assert any(texts)


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_grammar_begins_after_reasoning(model_folder: Path, has_begun: bool) -> None:
    tokenizer = Tokenizer.from_folder(model_folder)
    writer = GrammarWriter(tokenizer)
    forms = [
        StructuredOutput(json_schema=NOTHING),
        StructuredOutput(regex=r"a/b|c\/d\n?|e f"),
        StructuredOutput(choice=['say "yes"', "no\n"]),
        StructuredOutput(json_object=True),
    ]
    for content in forms:
        grammar = writer.write(calls=None, content=content, reasoning=THINK, has_begun=has_begun)
        for seed in range(4):
            text = sampled(tokenizer, grammar, seed, 300)
            if text is None:
                continue
            answer = read_answer(AnswerReader(ReasoningReader(*THINK, has_begun=has_begun), None), text)
            if content.choice:
                assert answer.content in content.choice
            elif content.regex:
                assert answer.content in ("a/b", "c/d", "c/d\n", "e f")
            else:
                assert isinstance(json.loads(answer.content), dict)


def test_special_tokens_in_a_grammar_are_tokens(model_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(model_folder)
    writer = GrammarWriter(tokenizer)
    form = hermes(("<|im_start|>", "</tool_call>"))
    rules = writer.calls(form, FUNCTIONS[1:], parallel=False)
    grammar = writer.write(calls=rules, content=None, reasoning=("<think>", "<|endoftext|>"), has_begun=True)
    text = next(filter(None, (sampled(tokenizer, grammar, seed) for seed in range(20))))
    reader = AnswerReader(
        ReasoningReader("<think>", "<|endoftext|>", has_begun=True), form.new_reader({"mcp:time.now/v1"})
    )
    assert read_answer(reader, text).calls[0].arguments == "{}"


CALLS = [
    {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}},
    {"id": "b", "type": "function", "function": {"name": "g", "arguments": {}}},
]


@pytest.mark.parametrize("name", FORMATS)
def test_tools_are_described_where_the_template_does_not_show_them(name: str) -> None:
    form: CallFormat = FORMATS[name]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
    ]
    tool = {"type": "function", "function": {"name": "f", "description": "Find é"}}
    system, user, assistant, result = described(messages, [tool], form)
    assert json.dumps(tool, ensure_ascii=False) in system["content"]
    assert form.written([("NAME", {"ARGUMENT": "VALUE"})]) in system["content"]
    assert user == messages[0]
    assert assistant["content"] == "I look.\n" + form.written([("f", {"x": "é"}), ("g", {})])
    assert result == {
        "role": "user",
        "content": "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>",
    }
    merged = described([{"role": "system", "content": "Be kind."}, *messages], [tool], form)
    assert merged[0]["content"].startswith("Be kind.\n\n")
    assert len(merged) == 4
    assert described(messages[:1], [], form) == messages[:1]
