"""Calls and reasoning of GLM 4.5 to 4.7 and MiniMax M2, as their chat templates write them, cut anywhere."""

import json
from pathlib import Path
from typing import Any

import pytest
from call_pieces import outcome
from tiny_chat import write_model

from octavo.server.parsing.answer import AnswerReader, ReasoningReader
from octavo.server.parsing.call_formats import GLM45, MINIMAX, XmlFormat
from octavo.server.parsing.effort import reasoning_variables
from octavo.server.parsing.formats import formats_of
from octavo.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "any": {},
        "list": {"type": "array"},
    },
}
FUNCTIONS = [("find", SCHEMA), ("now", {"type": "object"})]
# Answers, what stands beside calls, and the calls.
CASES: dict[str, tuple[XmlFormat, str, str, list[tuple[str, dict[str, Any]]]]] = {
    "glm-4.5": (
        GLM45,
        "\n<think>Hm.</think>\nI look.\n<tool_call>find\n<arg_key>city</arg_key>\n<arg_value>Rome\n"
        "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "I look.",
        [("find", {"city": "Rome\n", "days": 3}), ("now", {})],
    ),
    "glm-4.7": (
        GLM45,
        '<think>Hm.</think><tool_call>find<arg_key>list</arg_key><arg_value>[1, {"a": "b"}]</arg_value>'
        "<arg_key>any</arg_key><arg_value>007</arg_value></tool_call>",
        "",
        [("find", {"list": [1, {"a": "b"}], "any": "007"})],
    ),
    "glm-text-after": (
        GLM45,
        "<think>Hm.</think><tool_call>now</tool_call> I called.",
        "I called.",
        [("now", {})],
    ),
    "glm-unknown": (
        GLM45,
        '<think>Hm.</think><tool_call>{"name": "now"}</tool_call>',
        '<tool_call>{"name": "now"}</tool_call>',
        [],
    ),
    "glm-breaks-off": (
        GLM45,
        "<think>Hm.</think><tool_call>find<arg_key>city</arg_key><arg_value>Rome</arg_value>",
        "<tool_call>find<arg_key>city</arg_key><arg_value>Rome</arg_value>",
        [],
    ),
    "minimax": (
        MINIMAX,
        "<think>\nHm.\n</think>\n\nI look.\n<minimax:tool_call>\n"
        '<invoke name="find">\n<parameter name="city">Rome</parameter>\n<parameter name="days">3'
        '</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "I look.",
        [("find", {"city": "Rome", "days": 3}), ("now", {})],
    ),
    "minimax-two-blocks": (
        MINIMAX,
        '<think>Hm.</think><minimax:tool_call><invoke name="find"><parameter name="list">["a"]</parameter>'
        '</invoke></minimax:tool_call>\n<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>',
        "",
        [("find", {"list": ["a"]}), ("now", {})],
    ),
    "minimax-quotes": (
        MINIMAX,
        '<think>Hm.</think><minimax:tool_call><invoke name="find"><parameter name="city">"Rome">\n'
        "</parameter></invoke></minimax:tool_call>",
        "",
        [("find", {"city": '"Rome">\n'})],
    ),
}


def read(form: XmlFormat, chunks: list[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    reader = AnswerReader(ReasoningReader("<think>", "</think>", has_begun=False), form.reader(FUNCTIONS))
    pieces = [piece for chunk in chunks for piece in reader.feed(chunk)] + reader.finish()
    thoughts = "".join(piece.text for piece in pieces if piece.kind == "reasoning")
    content, calls = outcome([piece for piece in pieces if piece.kind != "reasoning"])
    return thoughts.strip(), content.strip(), [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("case", CASES)
def test_an_answer_cut_anywhere_is_the_whole_answer(case: str) -> None:
    form, text, content, calls = CASES[case]
    expected = ("Hm.", content, calls)
    assert read(form, [text]) == expected
    for cut in range(1, len(text)):
        assert read(form, [text[:cut], text[cut:]]) == expected, cut
    assert read(form, list(text)) == expected


@pytest.mark.parametrize("form", [GLM45, MINIMAX], ids=["glm45", "minimax"])
def test_a_value_may_mention_tags_but_hides_no_argument(form: XmlFormat) -> None:
    tags = form.tags
    for text in (
        tags.call,
        tags.end_call,
        tags.parameter,
        tags.end_function,
        f"{tags.parameter}city",
        "<",
        ">",
    ):
        arguments = {"city": f"see {text} there", "days": 1}
        assert read(form, [form.written([("find", arguments)])]) == ("", "", [("find", arguments)])
    lost = form.written([("find", {"city": "Rome", "days": 1})]).replace(tags.end_parameter, "", 1)
    assert read(form, [lost])[2] == []


GLM = """{% if tools %}<tool_call>{name}<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>{{ tools }}{% endif %}\
{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>\
{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}"""
M2 = """{% if tools %}<minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke>{{ tools }}\
{% endif %}{% for m in messages %}]~b]user{{ m.content }}{% endfor %}]~b]ai\n<think>\n"""


@pytest.mark.parametrize(("template", "form", "has_switch"), [(GLM, GLM45, True), (M2, MINIMAX, False)])
def test_templates_tell_the_format_and_how_to_switch_reasoning_off(
    tmp_path: Path, template: str, form: XmlFormat, has_switch: bool
) -> None:
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_folder(folder)
    found = formats_of(tokenizer, "auto", "auto")
    assert found.calls is form
    assert found.reasoning == ("<think>", "</think>")
    assert found.shows_tools
    assert tokenizer.chat_template is not None
    switches = reasoning_variables(tokenizer.chat_template, "none", None, is_harmony=False)
    assert switches == ({"enable_thinking": False} if has_switch else {})
    text = tokenizer.chat_template.prompt([{"role": "user", "content": "Hi"}], variables=switches).text
    assert text.rstrip().endswith("</think>" if has_switch else "<think>")
