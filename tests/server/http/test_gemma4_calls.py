"""Calls and reasoning of Gemma 4, as its chat template writes them, cut anywhere and held to schemas."""

import json
from typing import Any

import pytest
import tokenizers
from call_pieces import outcome
from test_strict_tools import FUNCTIONS, INVALID, VALID, Judge
from tiny_chat import write_model

from octavo.server.parsing.answer import AnswerReader, ReasoningReader
from octavo.server.parsing.answer_grammars import GrammarWriter
from octavo.server.parsing.call_formats import GEMMA4
from octavo.server.parsing.effort import reasoning_variables
from octavo.server.parsing.formats import formats_of

THOUGHT = ("<|channel>thought", "<channel|>")
SPECIAL = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
HM = "<|channel>thought\nHm.\n<channel|>"
NOW: list[tuple[str, dict[str, Any]]] = [("now", {})]
DEEP = {"a": [1, {"b": "<|"}], "n": None}
# What follows the reasoning, what stands beside calls, and the calls.
CASES: dict[str, tuple[str, str, list[tuple[str, dict[str, Any]]]]] = {
    "all-types": (
        'I look.<|tool_call>call:find{city:<|"|>Rome, {a:1}\n"<|"|>,deep:{a:[1,{b:<|"|><|<|"|>}],n:null},'
        "n:-1.5,yes:true}<tool_call|>",
        "I look.",
        [("find", {"city": 'Rome, {a:1}\n"', "deep": DEEP, "n": -1.5, "yes": True})],
    ),
    "several": ("<|tool_call>call:now{}<tool_call|><|tool_call>call:now{}<tool_call|>", "", NOW * 2),
    "spaces": (
        '<|tool_call>call:find{ city : <|"|>a<|"|> , days : 3 }<tool_call|> Done.',
        "Done.",
        [("find", {"city": "a", "days": 3})],
    ),
    "python-names": ("<|tool_call>call:f{a:[None,True,False]}", "", [("f", {"a": [None, True, False]})]),
    "bare-texts": ("<|tool_call>call:f{a:Rome,b:007}", "", [("f", {"a": "Rome", "b": "007"})]),
    "json": ('<|tool_call>call:f{"a":"b"}<tool_call|>', "", [("f", {"a": "b"})]),
    "quoted-keys": ('<|tool_call>call:f{<|"|>a b<|"|>:1}<tool_call|>', "", [("f", {"a b": 1})]),
    "marker-twice": ("<|tool_call><|tool_call>call:now{}<tool_call|><tool_call|>", "", NOW),
    "breaks-off": ('<|tool_call>call:f{a:<|"|>b', '<|tool_call>call:f{a:<|"|>b', []),
    "no-call": ("<|tool_call>now{}", "<|tool_call>now{}", []),
    "no-name": ("<|tool_call>call:{}", "<|tool_call>call:{}", []),
    "cut-string": ('<|tool_call>call:f{a:["b, c"]}', '<|tool_call>call:f{a:["b, c"]}', []),
    "no-value": ("<|tool_call>call:f{a}", "<|tool_call>call:f{a}", []),
    "other-tag": ("<|tool_call>call:f{a:<b>}", "<|tool_call>call:f{a:<b>}", []),
    "end-within": ("<|tool_call>call:f{a:1<tool_call|>", "<|tool_call>call:f{a:1<tool_call|>", []),
    "broken-then-whole": ("<|tool_call>call:f{a:}<|tool_call>call:now{}", "<|tool_call>call:f{a:}", NOW),
}  # fmt: skip


def read(chunks: list[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    reader = AnswerReader(ReasoningReader(*THOUGHT, has_begun=False), GEMMA4.reader([("now", {})]))
    pieces = [piece for chunk in chunks for piece in reader.feed(chunk)] + reader.finish()
    thoughts = "".join(piece.text for piece in pieces if piece.kind == "reasoning")
    content, calls = outcome([piece for piece in pieces if piece.kind != "reasoning"])
    return thoughts, content.strip(), [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "thought", [HM, "", "<|channel>thought\n<channel|>"], ids=["thought", "none", "empty"]
)
def test_an_answer_cut_anywhere_is_the_whole_answer(case: str, thought: str) -> None:
    text, content, calls = CASES[case]
    expected = ("Hm." if thought == HM else "", content, calls)
    text = thought + text
    assert read([text]) == expected
    for cut in range(1, len(text)):
        assert read([text[:cut], text[cut:]]) == expected, cut
    assert read(list(text)) == expected


TEMPLATE = """{% if tools %}<|turn>system\n{{ tools }}<turn|>\n{% endif %}\
{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}\
{{ '<|tool_call>call:' + c.function.name }}{{ '}<tool_call|>' }}{% endfor %}<turn|>\n{% endfor %}\
<|turn>model\n{% if enable_thinking is defined and not enable_thinking %}\
{{ '<|channel>thought\\n<channel|>' }}{% endif %}"""


@pytest.fixture(scope="module", params=[True, False], ids=["special", "plain"])
def judge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """Files of llama.cpp have the markers as plain tokens."""
    folder = write_model(tmp_path_factory.mktemp("gemma"))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    (backend.add_special_tokens if request.param else backend.add_tokens)(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Judge(folder)


def test_a_template_tells_the_formats_and_how_to_switch_reasoning_off(judge: Judge) -> None:
    tokenizer = judge.tokenizer
    found = formats_of(tokenizer, "auto", "auto")
    assert found.calls is formats_of(tokenizer, "gemma4", "none").calls is GEMMA4
    assert found.reasoning == formats_of(tokenizer, "none", "gemma4").reasoning == THOUGHT
    assert found.shows_tools
    assert tokenizer.chat_template is not None
    switches = reasoning_variables(tokenizer.chat_template, "none", None, is_harmony=False)
    assert switches == {"enable_thinking": False}
    prompt = tokenizer.chat_template.prompt([{"role": "user", "content": "Hi"}], variables=switches).text
    assert prompt.endswith("<|channel>thought\n<channel|>")


def test_special_markers_hold_calls_to_schemas_after_reasoning(judge: Judge) -> None:
    writer = GrammarWriter(judge.tokenizer)
    rules = writer.calls(GEMMA4, FUNCTIONS, parallel=True)
    free = writer.write(calls=rules, content=None, reasoning=THOUGHT, has_begun=False, free=GEMMA4)
    must = writer.write(calls=rules, content=None, reasoning=THOUGHT, has_begun=False)
    for thought in (HM, ""):
        assert judge.allows(free, thought + "Yes.")
        assert not judge.allows(must, thought + "Yes.")
        for found in (VALID, INVALID):
            for arguments in found:
                text = thought + GEMMA4.written([("f", arguments)])
                assert judge.allows(free, text) == judge.allows(must, text) == (found is VALID), text


KIDS = {"type": "array", "items": {"$ref": "#/$defs/tree"}}
NESTED = {
    "type": "object",
    "properties": {
        "tree": {"$ref": "#/$defs/tree"},
        "pair": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        "many": {"type": ["array", "null"], "items": {"type": "string"}, "maxItems": 1},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
        "any": {},
        "one": {"const": {"a": "b"}},
    },
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                "v": {"type": "number"},
            },
            "required": ["v"],
        }
    },
}


def test_nested_schemas_are_held(judge: Judge) -> None:
    writer = GrammarWriter(judge.tokenizer)
    rules = writer.calls(GEMMA4, [("f", NESTED)], parallel=False)
    grammar = writer.write(calls=rules, content=None, reasoning=None, has_begun=False)
    tree = {"v": 1.5, "kids": [{"v": 2}, {"v": 3, "kids": []}]}
    for good in (
        {}, {"tree": tree}, {"pair": [1, 2]}, {"many": []}, {"many": ["a"]}, {"many": None}, {"map": {}},
        {"map": {"a": 1, "b": 2}}, {"one": {"a": "b"}}, {"any": [{"a": "b"}, None, 1.5, True, {}, []]},
        {"any": {"x": {"y": "z"}}, "map": {"k": 1}, "tree": tree},
    ):  # fmt: skip
        assert judge.allows(grammar, GEMMA4.written([("f", good)])), good
    for bad in (
        {"tree": {"kids": []}}, {"tree": {"v": 1, "kids": [1]}}, {"pair": [1]}, {"pair": [1, 2, 3]},
        {"many": ["a", "b"]}, {"map": {"a": "b"}}, {"one": {"a": "c"}}, {"other": 1},
    ):  # fmt: skip
        assert not judge.allows(grammar, GEMMA4.written([("f", bad)])), bad
