"""Qwen3-Coder's calls: parameters typed by schemas, whole = streamed, nothing is lost, in linear time."""

import itertools
import json
import time
from collections.abc import Iterable
from typing import Any

import pytest
from call_pieces import outcome
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.server.parsing.answer import Answer, AnswerReader, read_answer
from octavo.server.parsing.call_formats import QWEN3_CODER, XmlFormat
from octavo.server.parsing.piece import Piece
from octavo.server.parsing.xml_values import as_json

SCHEMA = {
    "type": "object",
    "properties": {
        "cmd": {"type": "string"},
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "on": {"type": "boolean"},
        "list": {"type": "array"},
        "object": {"$ref": "#/$defs/thing"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "kind": {"enum": ["1", "b"]},
        "level": {"enum": [1, 2]},
        "any": {},
        "loop": {"$ref": "#/properties/loop"},
    },
    "additionalProperties": {"type": "integer"},
    "$defs": {"thing": {"type": "object"}},
}
FUNCTIONS = [("f", SCHEMA), ("g", {"type": "object"})]
TEXTS = [
    "{test1,test2}", "}{", '"', '\\"', "\\", "\\\\", "'", "</tool_call>", "<tool_call>", "<function=f>",
    "</function>", "<parameter=cmd>", "</parameter", "<", "😀", "👩‍🚀", "é", "北京", "\n", "\n\n",
    "\t", "\x00", "\u2028", "for i in {1..3}; do echo \"$i\"; done", "]", "[", ",", ":", "", "null",
    "5", "a" * 200, "%s",
]  # fmt: skip
ADVERSARIAL = list(dict.fromkeys(first + second for first, second in itertools.product(TEXTS, repeat=2)))[
    ::5
][:200]


def reader(form: XmlFormat = QWEN3_CODER) -> AnswerReader:
    return AnswerReader(None, form.reader(FUNCTIONS))


def whole(text: str) -> Answer:
    answer = read_answer(reader(), text)
    for call in answer.calls:
        call.id = ""
    return answer


def streamed(chunks: Iterable[str]) -> list[Piece]:
    one = reader()
    return [piece for chunk in chunks for piece in one.feed(chunk)] + one.finish()


def call(inner: str, name: str = "f") -> str:
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("cmd", "5", "5"),
        ("cmd", "true", "true"),
        ("cmd", '{"a": 1}', '{"a": 1}'),
        ("cmd", '"quoted"', '"quoted"'),
        ("cmd", "  two\n\nlines \n", "  two\n\nlines \n"),
        ("cmd", "", ""),
        ("n", "5", 5),
        ("n", " -7 ", -7),
        ("n", "5.0", 5.0),
        ("n", "5.5", "5.5"),
        ("n", "five", "five"),
        ("n", "123456789012345678901234567890", 123456789012345678901234567890),
        ("n", "NaN", "NaN"),
        ("x", "5", 5),
        ("x", "1e3", 1000.0),
        ("on", "true", True),
        ("on", "False", False),
        ("on", "1", "1"),
        ("list", '[1, "a"]', [1, "a"]),
        ("list", "[1,", "[1,"),
        ("list", "[" * 50_000, "[" * 50_000),
        ("list", "__import__('os')", "__import__('os')"),
        ("object", '{"a": "</function>"}', {"a": "</function>"}),
        ("object", "[1]", "[1]"),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "5", "5"),
        ("kind", "1", "1"),
        ("level", "1", 1),
        ("any", "[1]", [1]),
        ("any", "words", "words"),
        ("loop", "1", "1"),
        ("other", "3", 3),
    ],
)
def test_values_are_typed_by_their_schemas(key: str, text: str, value: Any) -> None:
    answer = whole(call(parameter(key, text)))
    (found,) = answer.calls
    assert json.loads(found.arguments) == {key: value}
    assert type(json.loads(found.arguments)[key]) is type(value)
    assert answer.content == ""


def test_a_tool_without_schemas_takes_texts() -> None:
    assert whole(call(parameter("n", "5"), "g")).calls[0].arguments == '{"n": "5"}'
    assert whole(call(parameter("n", "5"), "unknown")).calls[0].arguments == '{"n": "5"}'
    assert as_json("5", None) == "5"


LEVEL = {"type": "string", "enum": ["1", "2"]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"allOf": [{"$ref": "#/$defs/level"}]}, "1", "1"),
        ({"allOf": [{"$ref": "#/$defs/level"}], "default": "1"}, "2", "2"),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "5", "5"),
        ({"$ref": "#/$defs/either"}, "1", "1"),
        ({"anyOf": [{"$ref": "#/$defs/level"}, {"type": "null"}]}, "1", "1"),
        ({"anyOf": [{"$ref": "#/$defs/level"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"$ref": "#/$defs/level"}, {"type": "integer"}]}, "1", "1"),
        ({"anyOf": [{"$ref": "#/$defs/level"}, {"type": "integer"}]}, "3", 3),
        ({"oneOf": [{"const": "true"}, {"const": "false"}]}, "true", "true"),
        ({"type": ["string", "number"], "enum": ["1", 2]}, "1", "1"),
        ({"type": ["string", "number"], "enum": ["1", 2]}, "2", 2),
        ({"type": "number", "enum": [1, 2.5]}, "1", 1),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, "7", 7),
        ({"allOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]}, "7", "7"),
        ({"$ref": "#/$defs/tree"}, "[1]", [1]),
    ],
)  # fmt: skip
def test_all_that_a_schema_says_decides_the_type(schema: dict, text: str, value: Any) -> None:
    defs = {
        "level": LEVEL,
        "either": {"anyOf": [{"const": "1"}, {"enum": ["2", "3"]}]},
        "loop": {"allOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]},
        "tree": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/tree"}}]},
    }
    for parameters in (
        {"properties": {"x": schema}, "$defs": defs},
        {"allOf": [{"properties": {"x": schema}}], "$defs": defs},
        {"additionalProperties": schema, "$defs": defs},
    ):
        form = QWEN3_CODER.reader([("f", parameters)])
        (found,) = read_answer(AnswerReader(None, form), call(parameter("x", text))).calls
        assert json.loads(found.arguments) == {"x": value}


def test_types_of_schemas_that_refer_to_each_other_take_little_time() -> None:
    refs = [{"allOf": [{"$ref": f"#/$defs/{n + 1}"}, {"$ref": f"#/$defs/{n + 1}"}]} for n in range(3_000)]
    defs = {str(number): schema for number, schema in enumerate([*refs, {"type": "string"}])}
    form = QWEN3_CODER.reader([("f", {"properties": {"x": refs[0]}, "$defs": defs})])
    begun = time.process_time()
    assert read_answer(AnswerReader(None, form), call(parameter("x", "a"))).calls
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("step", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_streamed_is_whole_at_every_cut_of_200_texts(step: int) -> None:
    assert len(set(ADVERSARIAL)) == 200
    for number, text in enumerate(ADVERSARIAL):
        arguments = {"cmd": text, "list": [text], "maybe": f"{text}.", "n": number}
        written = QWEN3_CODER.written([("f", arguments)])
        if "</parameter>" in written.replace("\n</parameter>\n", ""):
            continue
        expected = ("Hm.", [("f", json.dumps(arguments, ensure_ascii=False))])
        written = "Hm.\n" + written
        assert outcome(streamed([written])) == expected
        assert outcome(streamed(written)) == expected
        for cut in range(1 + number % step, len(written), step):
            assert outcome(streamed([written[:cut], written[cut:]])) == expected


def test_texts_are_streamed_as_they_come() -> None:
    one = reader()
    one.feed("<tool_call>\n<function=f>\n<parameter=cmd>\n")
    assert [piece.text for piece in one.feed("echo ")] == ["echo "]
    assert [piece.text for piece in one.feed('"x')] == ['\\"x']
    # What may be the value's end is held.
    assert one.feed("\n</para") == []
    assert [piece.text for piece in one.feed("graph>")] == ["\\n</paragraph>"]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=f></function></tool_call>",
        "<tool_call>\n<function=f>\n</function>\n</tool_call>\n",
        # What the model may leave out.
        "<function=f>\n</function>\n</tool_call>",
        "<function=f></function>",
        "<tool_call> <function=f> </function>",
    ],
)
def test_calls_without_parameters(text: str) -> None:
    answer = whole(text)
    assert [(found.name, found.arguments) for found in answer.calls] == [("f", "{}")]
    assert answer.content == ""


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{}\n</tool_call>",
        "<tool_call>",
        "<function=",
        "<function=>",
        "<function=f\n>",
        "<function=" + "f" * 300 + "></function>",
        "<function=f>text</function>",
        "<function=f>\n<param",
        "<function=f>\n<parameter=>1</parameter></function>",
        "<function=f>\n<parameter=a>1</parameter>",
        "<function=f>\n<parameter=a>1</function>",
        "<function=f>\n<parameter=a>1</parameter>2</function>",
        "<function=f>" + parameter("a", "1") * 2 + "</function>",
    ],
)
def test_malformed_calls_are_content(text: str) -> None:
    for prefix in ("", "Well,\n"):
        answer = whole(prefix + text)
        assert (answer.content, answer.calls) == (prefix + text, [])
        pieces = streamed(prefix + text)
        assert outcome(pieces) == (prefix + text, [])
        # What a stream told of such a call is no JSON: a client sees that it broke off.
        told = "".join(piece.text for piece in pieces if piece.kind == "arguments")
        with pytest.raises(json.JSONDecodeError):
            json.loads(told)


texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=6))
parts = st.one_of(
    texts, st.builds(parameter, st.sampled_from(["cmd", "n", "any", "zz"]), texts), texts.map(call),
    st.builds(lambda key, value: call(parameter(key, value)), st.sampled_from(["cmd", "list"]), texts),
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(parts=st.lists(parts, max_size=5), data=st.data())
def test_any_chunking_gives_the_same(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]
    expected = outcome(streamed([text]))
    assert outcome(streamed(chunks)) == expected
    assert outcome(streamed(text)) == expected
    answer = whole(text)
    assert (answer.content, [(found.name, found.arguments) for found in answer.calls]) == expected
    if not answer.calls:
        assert answer.content == text


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=f></tool_call>",
        "<tool_call>\n<function=f>\n</function></function>\n</tool_call>",
        "<tool_call><function=f></function></tool_call></tool_call>",
        "<tool_call><tool_call><function=f></function></tool_call>",
        "<tool_call><function=f><function=f></function></tool_call>",
        "<tool_call><function= f ></function></tool_call>",
    ],
)
def test_what_is_mended(text: str) -> None:
    answer = whole(text)
    assert [(found.name, found.arguments) for found in answer.calls] == [("f", "{}")]
    assert answer.content == ""


UNITS = (
    "<tool_call>", "<function=", "<function=f>", "<parameter=a>", "<parameter=cmd>\n", "\n", " ", "<",
    "\n</parameter", call(""), call(parameter("cmd", "a")), "</function>", "[", "x",
)  # fmt: skip


@pytest.mark.parametrize(
    "opened", ["", "<function=f>", "<function=f><parameter=cmd>", "<function=f><parameter=list>"]
)
def test_time_is_linear(opened: str) -> None:
    """Ten times the text takes some ten times as long, whole or in pieces; quadratic would be a hundred."""
    for unit, size in itertools.product(UNITS, (10**9, 5)):
        ratios = (ratio(opened, unit, size) for _ in range(4))
        assert any(found < 30 for found in ratios), (opened, unit, size)


def ratio(opened: str, unit: str, size: int) -> float:
    seconds = []
    for num_chars in (1_000, 10_000):
        text = (opened + unit * (num_chars // len(unit) + 1))[:num_chars]
        chunks = [text[at : at + size] for at in range(0, num_chars, size)]
        begun = time.process_time()
        streamed(chunks)
        seconds.append(time.process_time() - begun)
    # What is shorter than the clock's own noise is nothing.
    return seconds[1] / max(seconds[0], 5e-4)


def test_many_parameters_and_calls_are_read_in_linear_time() -> None:
    text = call("".join(parameter(f"p{number}", "1") for number in range(5_000))) + call("") * 2_500
    begun = time.process_time()
    assert len(whole(text).calls) == 2_501
    assert time.process_time() - begun < 2
