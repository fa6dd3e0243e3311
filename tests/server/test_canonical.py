"""What clients change without a meaning, in the shapes that APIs give it, and what is left alone."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.server.api.canonical import RULES, canonical

BILLING = "x-anthropic-billing-header: cc_version=2.1.77.e19; cc_entrypoint=cli; cch=6a1b3;"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}


def said(content: Any, role: str = "system") -> Any:
    """What becomes of a turn's content; the word "gone" if the turn is left out."""
    messages, _ = canonical([{"role": role, "content": content}, USER], [])
    return messages[0]["content"] if len(messages) == 2 else "gone"


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"{BILLING}\nBe kind.", "Be kind."),
        (f"{BILLING}\n\nBe kind.\n", "Be kind.\n"),
        (f"\n {BILLING.upper()}\r\nBe kind.", "Be kind."),
        (BILLING, "gone"),
        ([part(BILLING), part("Be kind."), part("Be brief.")], [part("Be kind."), part("Be brief.")]),
        ([part(f"{BILLING}\nBe kind.")], [part("Be kind.")]),
        ([part(BILLING)], "gone"),
        ([part("Be kind."), part(BILLING)], [part("Be kind."), part(BILLING)]),
        (f"Be kind.\n{BILLING}", f"Be kind.\n{BILLING}"),
        ("", ""),
        ([], []),
        (None, None),
        (7, 7),
        ([7, {"type": "image"}, part("")], [7, {"type": "image"}, part("")]),
    ],
)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_billing_line_begins_a_system_turn(role: str, content: Any, expected: Any) -> None:
    assert said(content, role) == expected


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_other_turns_may_speak_about_it(role: str) -> None:
    for text in (BILLING, "<env>Today's date: 2026-11-28 12:00</env>"):
        assert said(text, role) == text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Today's date: 2026-11-28T14:35:22.123Z", "Today's date: 2026-11-28"),
        ("Today's date: 2026-11-28 14:35", "Today's date: 2026-11-28"),
        ("Today’s date: 11/28/2026, 2:35:22 PM (UTC)", "Today’s date: 11/28/2026"),  # noqa: RUF001
        ("Today's date: Sat Nov 28 2026 14:35:22 GMT+0000 (UTC)", "Today's date: Sat Nov 28 2026"),
        ("<current_date>2026-11-28 14:35</current_date>", "<current_date>2026-11-28</current_date>"),
        # The day has a meaning, and a time that is called one, too.
        ("Today's date: 2026-11-28", "Today's date: 2026-11-28"),
        ("Current time: 2026-11-28 14:35", "Current time: 2026-11-28 14:35"),
        ("Released: 2026-11-28 14:35", "Released: 2026-11-28 14:35"),
    ],
)
@pytest.mark.parametrize("block", ["env", "environment", "environment_context", "environment_details"])
def test_a_date_in_a_block_of_the_environment_keeps_its_day(block: str, line: str, expected: str) -> None:
    text = "Be kind.\n<{0}>\nPlatform: linux\n{1}\n</{0}>\nToday's date: 2026-11-28 14:35\n"
    assert said(text.format(block, line)) == text.format(block, expected)
    assert said([part("x"), part(text.format(block, line))])[1] == part(text.format(block, expected))
    assert said(f"<{block}>\n{line}") == f"<{block}>\n{line}"


def tool(parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


def order(value: Any) -> Any:
    """The keys of JSON objects in their order, with what is below them."""
    if isinstance(value, dict):
        return [(key, order(entry)) for key, entry in value.items()]
    return [order(entry) for entry in value] if isinstance(value, list) else value


def test_keys_of_schemas_have_one_order_and_names_keep_theirs() -> None:
    first = {
        "type": "object",
        "properties": {
            "type": {"type": "string", "description": "a", "minLength": 1},
            "about": {"type": "array", "items": {"type": "object", "properties": {"z": {}, "a": True}}},
            "any": {"anyOf": [{"type": "null", "title": "t"}, {"$ref": "#/$defs/x"}]},
            "data": {"enum": [{"b": 1, "a": 2}], "default": {"b": 1, "a": 2}},
        },
        "required": ["type", "about"],
        "$defs": {"x": {"type": "integer", "minimum": 1}},
    }
    other = {
        "$defs": {"x": {"minimum": 1, "type": "integer"}},
        "required": ["type", "about"],
        "properties": {
            "type": {"minLength": 1, "description": "a", "type": "string"},
            "about": {"items": {"properties": {"z": {}, "a": True}, "type": "object"}, "type": "array"},
            "any": {"anyOf": [{"title": "t", "type": "null"}, {"$ref": "#/$defs/x"}]},
            "data": {"default": {"b": 1, "a": 2}, "enum": [{"b": 1, "a": 2}]},
        },
        "type": "object",
    }
    ((one,), (two,)) = (canonical([], [tool(schema)])[1] for schema in (first, other))
    assert order(one) == order(two)
    assert one == tool(first)
    properties = one["function"]["parameters"]["properties"]
    assert list(properties) == ["type", "about", "any", "data"]
    assert list(properties["about"]["items"]["properties"]) == ["z", "a"]
    assert list(properties["data"]["default"]) == list(properties["data"]["enum"][0]) == ["b", "a"]


def test_other_orders_of_properties_stay_others() -> None:
    """A model writes the arguments in this order."""
    one, two = ({"properties": {name: {} for name in names}} for names in ("ab", "ba"))
    assert order(canonical([], [tool(one)])[1]) != order(canonical([], [tool(two)])[1])


def test_a_tool_without_parameters_stays() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}, tool({})]
    assert canonical([], tools)[1] == tools


@pytest.mark.parametrize(
    "text",
    [
        "<env>" * 100_000,
        "<env>Today's date: 2026" * 50_000 + "</env>",
        "\n" * 1_000_000,
        "<env>" + "1" * 10**6,
    ],
)
def test_it_takes_no_time(text: str) -> None:
    begun = time.process_time()
    said(text)
    assert time.process_time() - begun < 2


WORDS = st.sampled_from(
    ["type", "text", "properties", "items", "anyOf", "enum", BILLING, "<env>", "</env>", "x"]
)
LEAVES = st.none() | st.booleans() | st.integers() | WORDS
ANYTHING = st.recursive(LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(WORDS, v, max_size=4))


@given(content=ANYTHING, schema=st.dictionaries(WORDS, ANYTHING))
def test_whatever_a_client_sends_is_taken_and_no_schema_changes(content: Any, schema: Any) -> None:
    """What is wrong with it is said by those who read it next."""
    for role in ("system", None, 7, [], "user"):
        messages, (tools,) = canonical([{"role": role, "content": content}], [tool(schema)])
        assert role == "system" or messages == [{"role": role, "content": content}]
        assert tools == tool(schema)


def test_the_rules_are_documented() -> None:
    text = re.sub(r"\s+", " ", (Path(__file__).parents[2] / "docs/serving.md").read_text())
    for rule in RULES:
        assert f"| {rule.name} | {rule.api} | {rule.why} |" in text


def test_a_text_of_many_blocks_is_copied_once() -> None:
    text = "<env></env>" * 100_000
    begin = time.monotonic()
    assert said(text) == text
    assert time.monotonic() - begin < 5
