"""Readers of tool calls: what is a call, what is content, however the text is cut; in linear time."""

import codecs
import itertools
import json
import time
from collections.abc import Iterable

import pytest
from call_pieces import outcome
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.server.parsing.answer import Answer, AnswerReader, read_answer
from octavo.server.parsing.formats import LLAMA, MISTRAL, MISTRAL_LIST, CallFormat, hermes
from octavo.server.parsing.piece import Piece

FORMATS = {"hermes": hermes(), "llama3_json": LLAMA, "mistral": MISTRAL, "mistral-list": MISTRAL_LIST}
NAMES = frozenset({"f", "g"})

PARTS = [
    "{test1,test2}", "{test1,test2", "}{", '"', '\\"', "\\", "\\\\", "'", "</tool_call>", "<tool_call>",
    '<tool_call>{"name": "f"}', "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "😀", "👩‍🚀", "é", "北京",
    "\n", "\t", "\x00", "\u2028", "for i in {1..3}; do echo \"$i\"; done", "]", "[", ",", ":", ";", "",
    "<think>", "</think>", "a" * 300, '{"a": [1, {"b": "}"}]}', "{{ x }}", "%s", "\\u0041", "&lt;", "\ud7ff",
]  # fmt: skip
ADVERSARIAL = list(dict.fromkeys(first + second for first, second in itertools.product(PARTS, repeat=2)))[
    ::6
][:200]


def reader(form: CallFormat) -> AnswerReader:
    return AnswerReader(None, form.new_reader(NAMES))


def whole(form: CallFormat, text: str) -> Answer:
    answer = read_answer(reader(form), text)
    for call in answer.calls:
        call.id = ""
    return answer


def streamed(form: CallFormat, chunks: Iterable[str]) -> list[Piece]:
    one = reader(form)
    return [piece for chunk in chunks for piece in one.feed(chunk)] + one.finish()


def test_there_are_200_adversarial_texts() -> None:
    assert len(set(ADVERSARIAL)) == 200


@pytest.mark.parametrize("name", FORMATS)
def test_streamed_arguments_are_the_whole_ones_byte_for_byte(name: str) -> None:
    form = FORMATS[name]
    for number, text in enumerate(ADVERSARIAL):
        arguments = {"cmd": text, text: [text, {"x": text}]}
        written = form.written([("f", arguments)])
        answer = whole(form, written)
        assert [call.name for call in answer.calls] == ["f"]
        assert answer.calls[0].arguments == json.dumps(arguments, ensure_ascii=False)
        assert answer.content == ""
        # As bytes of any size, so that characters are cut.
        data, size = written.encode(), 1 + number % 7
        decoder = codecs.getincrementaldecoder("utf-8")()
        chunks = [decoder.decode(data[at : at + size]) for at in range(0, len(data), size)]
        pieces = streamed(form, chunks)
        assert (
            "".join(piece.text for piece in pieces if piece.kind == "arguments") == answer.calls[0].arguments
        )
        assert [piece.kind for piece in pieces].count("arguments") > 1 or size > 1


texts = st.one_of(st.sampled_from(PARTS), st.text(max_size=8))
arguments = st.dictionaries(texts, st.one_of(texts, st.integers(), st.lists(texts, max_size=2)), max_size=3)
calls = st.builds(
    lambda form, value: FORMATS[form].written([("f", value)]), st.sampled_from([*FORMATS]), arguments
)


@settings(max_examples=120, deadline=None)
@given(
    form=st.sampled_from([*FORMATS]),
    parts=st.lists(st.one_of(texts, calls, calls.map(lambda call: call[:-3])), max_size=5),
    data=st.data(),
)
def test_any_chunking_gives_the_same(form: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]
    expected = outcome(streamed(FORMATS[form], [text]))
    assert outcome(streamed(FORMATS[form], chunks)) == expected
    assert outcome(streamed(FORMATS[form], text)) == expected


@settings(max_examples=100, deadline=None)
@given(form=st.sampled_from([*FORMATS]), text=st.lists(texts, max_size=6).map("".join))
def test_what_is_no_call_is_content_and_nothing_is_lost(form: str, text: str) -> None:
    answer = whole(FORMATS[form], text)
    if not answer.calls:
        assert answer.content == text


@settings(max_examples=100, deadline=None)
@given(
    form=st.sampled_from([*FORMATS]),
    before=st.text(max_size=10),
    values=st.lists(arguments, min_size=1, max_size=3),
)
def test_content_before_calls_is_kept(form: str, before: str, values: list[dict]) -> None:
    if form == "llama3_json" and before.strip():
        return
    written = FORMATS[form].written([("f", value) for value in values])
    answer = whole(FORMATS[form], before + written)
    assert answer.content == before.rstrip()
    assert [json.loads(call.arguments) for call in answer.calls] == values


@pytest.mark.parametrize(
    ("form", "text", "names"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', ["f"]),
        ("hermes", 'Hm.\n<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>\n\n', ["f"]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', ["f"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', ["f"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool_ca', ["f"]),
        ("hermes", '<tool_call>{"name": "f"}<tool_call>{"name": "g", "arguments": {}}', ["f", "g"]),
        ("hermes", '<tool_call>{"na\\u006de": "f", "parameters": {}}</tool_call>', ["f"]),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', ["f"]),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', ["f"]),
        ("llama3_json", 'Sure. <|python_tag|>{"name": "f", "parameters": {}}', ["f"]),
        ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', ["f", "g"]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g"}]', ["f", "g"]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', ["f", "g"]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', ["f"]),
        # What is mended: null, a brace or a marker too many, several objects.
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', ["f"]),
        ("hermes", '<tool_call>{"arguments": null, "name": "f"}', ["f"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>', ["f"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} }', ["f"]),
        ("hermes", '<tool_call>{"name": "f"}}\n{"name": "g"}\n</tool_call>', ["f", "g"]),
        ("hermes", '<tool_call>{"name": "f"}, {"name": "g"}</tool_call>', ["f", "g"]),
        ("hermes", '<tool_call><tool_call>{"name": "f"}</tool_call></tool_call>', ["f"]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>\n{"name": "g"}</tool_call>', ["f"]),
        ("llama3_json", '{"name": "f", "parameters": null}', ["f"]),
        ("llama3_json", '{"name": "f", "parameters": {}}}; {"name": "g", "parameters": {}}}', ["f", "g"]),
        ("llama3_json", '{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}', ["f", "g"]),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": null}}, {"name": "g"}]', ["f", "g"]),
        ("mistral", '[TOOL_CALLS][{"name": "f"} {"name": "g"}]', ["f", "g"]),
        ("mistral", '[TOOL_CALLS][TOOL_CALLS]f[ARGS]{"a": 1}}[TOOL_CALLS]g[ARGS]{}', ["f", "g"]),
    ],
)  # fmt: skip
def test_calls(form: str, text: str, names: list[str]) -> None:
    answer = whole(FORMATS[form], text)
    assert [call.name for call in answer.calls] == names
    assert all(isinstance(json.loads(call.arguments), dict) for call in answer.calls)
    assert answer.content in ("", "Hm.", "Sure.", '\n{"name": "g"}</tool_call>')


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "name": "g"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'),
        ("hermes", "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}"),
        ("hermes", "<tool_call>{]</tool_call>"),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": {"b": 1}}}, "c": 2}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 30 + "1" + "}" * 31),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}, "b": 2}}'),
        ("hermes", "<tool_call> nothing </tool_call>"),
        ("llama3_json", '{"name": "unknown", "parameters": {}}'),
        ("llama3_json", '{"name": "f"}'),
        ("llama3_json", '{"city": "Paris", "parameters": {}}'),
        ("llama3_json", 'The answer is {"name": "f", "parameters": {}}'),
        ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS][ARGS]{}"),
        ("mistral", "[TOOL_CALLS]f[OTHER]{}"),
        ("mistral", "[TOOL_CALLS]f[ARGS] x {}"),
        ("mistral", '[TOOL_CALLS]f{"a": 1}g[ARGS]{}'),
        ("mistral", "[TOOL_CALLS]fabcdefghi[ARGS]{}"),
    ],
)
def test_malformed_calls_are_content(form: str, text: str) -> None:
    for prefix in ("", "Well,\n" if form != "llama3_json" else ""):
        answer = whole(FORMATS[form], prefix + text)
        assert answer.calls == []
        assert answer.content == prefix + text
        pieces = streamed(FORMATS[form], prefix + text)
        assert "".join(piece.text for piece in pieces if piece.kind in ("content", "broken")) == prefix + text
        assert all(piece.kind != "complete" for piece in pieces)


def test_a_complete_call_survives_a_broken_neighbour() -> None:
    good, bad = '[TOOL_CALLS][{"name": "f", "arguments": {}}', ', {"name": "f", "arguments": {"a": }}]'
    answer = whole(MISTRAL, good + bad)
    assert len(answer.calls) == 1
    assert answer.content == bad


def test_ids_are_new_and_mistrals_are_as_its_templates_demand() -> None:
    ids = [reader(form).new_id() for form in FORMATS.values() for _ in range(50)]
    assert len(set(ids)) == len(ids)
    assert all(len(one) == 9 and one.isalnum() for one in ids[100:])


OPENED = {
    "hermes": '<tool_call>{"name":"f","arguments":{"a":',
    "llama3_json": '{"name":"f","parameters":{"a":',
    "mistral": '[TOOL_CALLS]f[ARGS]{"a":',
}
UNITS = {
    "hermes": ("<tool_call>{", "<tool_call>", '<tool_call>{"name":"f","arguments":{}}', "<"),
    "llama3_json": ("<|python_tag|>{", '{"name":"f","parameters":{}};', "; "),
    "mistral": ("[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]{}", "[", "a[ARGS]", '[TOOL_CALLS][{"name":"f"}]'),
}
SIZES = (1_000, 10_000)


@pytest.mark.parametrize("name", OPENED)
def test_time_is_linear(name: str) -> None:
    """Ten times the text takes some ten times as long, whole or in pieces; quadratic would be a hundred."""
    for opened in ("", OPENED[name]):
        for unit in (*UNITS[name], "{", '"', '\\"', " ", '{"a":'):
            for size in (10**9, 3):
                ratios = (_ratio(name, opened, unit, size) for _ in range(4))
                assert any(ratio < 25 for ratio in ratios), (opened, unit, size)


def _ratio(name: str, opened: str, unit: str, size: int) -> float:
    seconds = []
    for num_chars in SIZES:
        text = (opened + unit * (num_chars // len(unit) + 1))[:num_chars]
        seconds.append(_seconds(name, [text[at : at + size] for at in range(0, num_chars, size)]))
    # What is shorter than the clock's own noise is nothing.
    return seconds[1] / max(seconds[0], 5e-4)


def test_a_megabyte_is_read() -> None:
    assert _seconds("hermes", [(OPENED["hermes"] + '\\"{' * 400_000)[:1_000_000]]) < 10


def _seconds(name: str, chunks: list[str]) -> float:
    begun = time.process_time()
    streamed(FORMATS[name], chunks)
    return time.process_time() - begun
