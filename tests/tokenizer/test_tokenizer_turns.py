"""Turns as answers have them: what is left out, what is null, which form of a turn a template gets."""

from typing import Any

import pytest

from octavo.errors import ChatTemplateError
from octavo.tokenizer.chat_template import ChatTemplate
from octavo.tokenizer.messages import checked_messages
from octavo.tokenizer.turns import forms_of

USER: dict[str, Any] = {"role": "user", "content": "Hi"}


def call(arguments: object, name: str = "f", **fields: object) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"arguments": arguments, "name": name}, **fields}


def turn(content: object, *calls: dict[str, Any], **fields: object) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **fields}


def rendered(reading: str, *messages: dict[str, Any]) -> str:
    return ChatTemplate("{% for m in messages %}" + reading + "{% endfor %}").render([USER, *messages])


def test_what_clients_add_is_left_out_and_arguments_are_objects_behind_the_name() -> None:
    given = turn(
        None,
        call('{"x": 1}', index=0)
        | {"function": {"arguments": '{"x": 1}', "name": "f", "parsed_arguments": None}},
        *(call(nothing) for nothing in (None, "", " ", "null", {})),
        refusal=None,
        audio=None,
        function_call=None,
        annotations=[],
        parsed=None,
        reasoning="Hm.",
    )
    (checked,) = checked_messages([given])
    first, *others = checked["tool_calls"]
    assert first == {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert [*first["function"]] == ["name", "arguments"]
    assert [other["function"]["arguments"] for other in others] == [{}] * 5
    assert checked["reasoning_content"] == "Hm."
    assert checked.keys() == {"role", "content", "tool_calls", "reasoning_content"}


@pytest.mark.parametrize("content", [None, "", []])
def test_a_turn_may_have_no_content(content: object) -> None:
    for fields in ({}, {"reasoning_content": "Hm."}):
        (checked,) = checked_messages([turn(content, **fields)])
        assert checked["content"] in (None, "")
        assert "tool_calls" not in checked
        assert rendered("[{{ m.content }}]", checked) == "[Hi][]"


def test_a_call_that_broke_off_is_left_out_if_its_text_is_there() -> None:
    broken, whole = call('{"x": "a'), call('{"x": 1}')
    (checked,) = checked_messages([turn('<tool_call>{"x": "a', broken, whole)])
    assert [one["function"]["arguments"] for one in checked["tool_calls"]] == [{"x": 1}]
    (checked,) = checked_messages([turn("<tool_call>", broken)])
    assert "tool_calls" not in checked
    for messages in ([turn(None, broken)], [turn("", broken)], [{**turn("x", broken), "role": "user"}]):
        with pytest.raises(ChatTemplateError, match="expected JSON"):
            checked_messages(messages)
    with pytest.raises(ChatTemplateError, match="expected a JSON object"):
        checked_messages([turn("x", call("[1]"))])


CALLS = "{% for c in m.tool_calls or [] %}({{ c.function.name }}{{ c.function.arguments.x }}){% endfor %}"


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        # Who does not ask for null gets an empty text.
        ("[{{ m.content }}]" + CALLS, "[Hi][](fNone)"),
        ("[{% if 'x' in m.content %}x{% endif %}]" + CALLS, "[][](fNone)"),
        ("[{% if m.reasoning_content is not none %}{{ m.content + '' }}{% endif %}]", "[Hi][]"),
        # Who asks gets null, if it does not fail then, nor print the word.
        ("{% if m.content is none %}" + CALLS + "{% else %}[{{ m.content }}]{% endif %}", "[Hi](fNone)"),
        ("{% if m['content'] is not none %}[{{ m.content }}]{% endif %}" + CALLS, "[Hi](fNone)"),
        ("{% if m.content == None %}-{% endif %}" + CALLS, "-(fNone)"),
        ("{% set content = m.content %}{% if content is none %}-{% endif %}[{{ content }}]", "[Hi][]"),
        ("{% if m.content is none and not m.tool_calls %}{% elif m.content | length %}+{% endif %}", "+"),
    ],
)
def test_a_null_content_is_null_or_empty_as_the_template_wants(reading: str, expected: str) -> None:
    # Whole answers have null, and those put together from a stream an empty text.
    for content in (None, ""):
        assert rendered(reading, turn(content, call({"x": "None"}))) == expected


def test_content_beside_calls_and_nothing_are_taken_by_any_template() -> None:
    both = "{% if m.content and m.tool_calls %}{{ raise_exception('both') }}{% endif %}"
    assert rendered(both + "[{{ m.content }}]" + CALLS, turn("a", call({"x": 1}))) == "[Hi][a][](f1)"
    empty = "{% if not m.content and not m.tool_calls %}{{ raise_exception('empty') }}{% endif %}"
    assert rendered(empty + "[{{ m.content }}]", turn(""), USER) == "[Hi][ ][Hi]"


def test_a_template_that_refuses_every_form_says_why_it_refused_the_first() -> None:
    with pytest.raises(ChatTemplateError, match="no 2"):
        rendered("{{ raise_exception('no ' ~ messages | length) if m.tool_calls }}", turn("a", call({})))


def test_equal_forms_are_one() -> None:
    plain = checked_messages([USER, {"role": "assistant", "content": "a"}, USER])
    assert [*forms_of(plain, "content is none")] == [plain]
    assert len([*forms_of(checked_messages([turn(None, call({}))]), "message.content is none")]) == 2
