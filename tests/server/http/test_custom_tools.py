"""Custom tools in every format: a text is held to its grammar, and read back, however it is cut."""

import contextlib
import json
import time
from typing import Any

import pytest
from test_strict_tools import FORMATS, Judge
from tiny_chat import write_model
from tiny_harmony import write_harmony_model

from octavo.errors import StructuredOutputError
from octavo.server.api.responses.response_items import OutputWriter
from octavo.server.api.responses.response_structs import (
    CustomResponseTool,
    Namespace,
    ResponseTool,
    TextInput,
)
from octavo.server.api.responses.response_tools import chat_tools, names_of
from octavo.server.api.tools.tool_choice import function_tool
from octavo.server.parsing.answer import AnswerReader
from octavo.server.parsing.answer_grammars import GrammarWriter, harmony_grammar
from octavo.server.parsing.custom.lark_text import written
from octavo.server.parsing.custom.text_reader import CustomReader
from octavo.server.parsing.custom.text_tool import TextParameters
from octavo.server.parsing.harmony import harmony_of
from octavo.server.parsing.harmony_reader import HarmonyReader
from octavo.server.parsing.piece import Piece

PATCH = """
start: "*** Begin" LF hunk+ "*** End" LF?
hunk: "+" /(.*)/ LF -> line | NAME LF
NAME: /[^"\\n+*]+/ | "a\\tb"
%import common.LF
"""
CODE = r"""
start: pragma? SOURCE
pragma: /[ \t]*\/\/ @exec:[^\r\n]*/ NEWLINE
NEWLINE: /\r?\n/
SOURCE: /[\s\S]+/
"""
# Grammar, texts that it allows, texts that it does not.
GRAMMARS: list[tuple[TextParameters, list[str], list[str]]] = [
    (TextParameters(), ["", 'a"b\\c\n\té😀', "{}"], []),
    (TextParameters("regex", r"[ab]+\n?"), ["a", "abba\n"], ["", "c", "a\nb"]),
    (
        TextParameters("lark", PATCH),
        ['*** Begin\n+say("hi\\n")\t/é\n*** End', "*** Begin\na\tb\n+\nx\n*** End\n"],
        ["", "*** Begin\n*** End", "*** Begin\n+a*** End", '*** Begin\n"\n*** End'],
    ),
    (TextParameters("lark", CODE), ['// @exec: {"a": 1}\r\nlet x = "\\\n";', "x"], [""]),
    (
        TextParameters("lark", r'start: "a"i /\d{2,3}(?:x|"y)?\x22?[^\W\d_]/'),
        ['A12"yq', "a123z"],
        ["a1z", "a12"],
    ),
]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(write_model(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def harmony_judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(write_harmony_model(tmp_path_factory.mktemp("harmony")))


def outcome(reader: Any, text: str, cut: int) -> tuple[list[str], str, int]:
    """The names of custom calls, their text, and the number of whole calls; fed in parts of a length."""
    pieces: list[Piece] = []
    for begin in range(0, len(text), cut):
        pieces += reader.feed(text[begin : begin + cut], [])
    pieces += reader.finish()
    assert not [piece for piece in pieces if piece.kind in ("call", "arguments", "broken")]
    names = [piece.text for piece in pieces if piece.kind == "custom"]
    return names, "".join(piece.text for piece in pieces if piece.kind == "input"), reader.num_calls


@pytest.mark.parametrize("case", range(len(GRAMMARS)))
@pytest.mark.parametrize("name", FORMATS)
def test_a_text_is_held_to_its_grammar_and_read_back(judge: Judge, name: str, case: int) -> None:
    form, (schema, good, bad) = FORMATS[name], GRAMMARS[case]
    writer, functions = GrammarWriter(judge.tokenizer), [("patch", schema)]
    rules = writer.calls(form, functions, parallel=True)
    must = writer.write(calls=rules, content=None, reasoning=None, has_begun=False)
    for text in good:
        written = form.written([("patch", {"input": text})])
        assert judge.allows(must, written), written
        for cut in (1, 7, 1000):
            reader = CustomReader(AnswerReader(None, form.reader(functions)), {"patch"})
            assert outcome(reader, written, cut) == (["patch"], text, 1)
    for text in bad:
        assert not judge.allows(must, form.written([("patch", {"input": text})])), text


@pytest.mark.parametrize(
    "source",
    [
        'start: "x"\n%import common.ESCAPED_STRING',
        "start: %json {}",
        "start: <|im_end|>",
        'start: "A\\n"i',
        r"start: /a\b/",
        r"start: /(?=a)b\n/",
        r"start: /\p{Greek}+/",
        "A: /a/ & /b/\nstart: A",
    ],
)
def test_what_cannot_be_held_within_json_is_named(source: str) -> None:
    with pytest.raises(StructuredOutputError):
        written(source, in_json=True)


def test_a_grammar_cannot_leave_its_block(judge: Judge) -> None:
    """What follows a closing brace would be rules of ours."""
    writer = GrammarWriter(judge.tokenizer)
    for form in FORMATS.values():
        with pytest.raises(StructuredOutputError, match="brace"):
            writer.calls(form, [("f", TextParameters("lark", 'start: "a"\n}\ncalls: "b"'))], parallel=False)


FILES = Namespace(
    name="mcp__files__",
    description="Files.",
    tools=[
        ResponseTool(name="read", parameters={"type": "object", "properties": {"path": {"type": "string"}}}),
        CustomResponseTool(name="patch", format=TextInput(type="grammar", syntax="lark", definition=PATCH)),
    ],
)
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize("cut", [1, 5, 400])
def test_harmony_calls_tools_of_namespaces_and_custom_ones(harmony_judge: Judge, cut: int) -> None:
    """gpt-oss serves Codex: flat names in the prompt and the grammar, namespaces and texts in the answer."""
    tools = chat_tools([FILES])
    functions = [
        (f.name, dict(f.parameters or {}) if tool.function else f.parameters)
        for tool in tools
        for f in [function_tool(tool)]
    ]
    assert [name for name, _ in functions] == ["mcp__files__read", "mcp__files__patch"]
    harmony = harmony_of(harmony_judge.tokenizer)
    assert harmony is not None
    grammar = harmony_grammar(harmony, functions, must_call=True, content=None, channel=None)
    text = '*** Begin\n+say("hi\\n")\n*** End'
    head = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
    calls = {"mcp__files__read": {"path": "a/b"}, "mcp__files__patch": {"input": text}}
    for name, arguments in calls.items():
        written = THOUGHT + head.format(name) + json.dumps(arguments)
        assert harmony_judge.allows(grammar, written)
        assert not harmony_judge.allows(grammar, written.replace("mcp__files__", ""))
        items = harmony_items(harmony_judge, written + "<|call|>", functions, cut)
        (call,) = items[1:]
        assert (call.namespace, f"{call.namespace}{call.name}") == ("mcp__files__", name)
        assert (
            json.loads(call.arguments) if hasattr(call, "arguments") else {"input": call.input}
        ) == arguments
    wrong = THOUGHT + head.format("mcp__files__patch") + json.dumps({"input": "*** Begin\n*** End"})
    assert not harmony_judge.allows(grammar, wrong)


def harmony_items(judge: Judge, text: str, functions: list[tuple[str, Any]], cut: int) -> list[Any]:
    """The items of an answer whose tokens come in parts."""
    harmony = harmony_of(judge.tokenizer)
    assert harmony is not None
    inner = HarmonyReader(harmony, names={name for name, _ in functions})
    reader = CustomReader(inner, {"mcp__files__patch"})
    writer = OutputWriter(reader.new_id, parallel=True, names=names_of([FILES]))
    ids = judge.tokenizer.encode(text, add_special_tokens=False)
    decoder = judge.tokenizer.incremental_decoder(skip_special_tokens=False)
    for begin in range(0, len(ids), cut):
        part = ids[begin : begin + cut]
        writer.write(reader.feed(decoder.push(part), part))
    writer.write(reader.finish())
    writer.finish("completed")
    return writer.items


@pytest.mark.parametrize(
    ("before", "again", "after"), [('"', '\\"', ""), ("/a", "\\/", ""), ("x: /a{", "1", "/")]
)
def test_hostile_grammars_take_time_that_grows_with_their_length_only(
    before: str, again: str, after: str
) -> None:
    begin = time.process_time()
    with contextlib.suppress(StructuredOutputError):
        written(before + again * 40_000 + after, in_json=True)
    # Ten times the text took a hundred times as long: 6 s and more for this one.
    assert time.process_time() - begin < 2.0
