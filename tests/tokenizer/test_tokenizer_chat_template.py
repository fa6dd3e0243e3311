"""Chat templates give the text that jinja2 gives in transformers, and refuse malformed messages."""

from datetime import datetime

import pytest
from template_samples import CONVERSATIONS, SMOLLM2, TEMPLATES, TOOL, transformers_at

from octavo.errors import ChatTemplateError
from octavo.tokenizer import ChatTemplate

NOW = datetime(2026, 3, 14, 15, 9, 26)


@pytest.fixture
def oracle(monkeypatch):
    """Transformers' own jinja2 environment, with a fixed clock."""
    templates = transformers_at(NOW, monkeypatch)

    def render(source: str, **context: object) -> str:
        return templates._compile_jinja_template(source).render(**context)

    return render


@pytest.mark.parametrize("conversation", list(CONVERSATIONS))
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_text_equals_jinja2(oracle, name, conversation):
    import jinja2

    source, messages = TEMPLATES[name], CONVERSATIONS[conversation]
    # Templates that do not look whether a call's content is null get an empty text.
    messages = [message | {"content": message.get("content") or ""} for message in messages]
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", clock=lambda: NOW)
    settings = [
        (True, None, {}),
        (False, [TOOL], {}),
        (True, [TOOL, TOOL], {"enable_thinking": False, "date_string": "today"}),
    ]
    for add_generation_prompt, tools, variables in settings:
        context = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools}
        context |= {"bos_token": "<s>", "eos_token": "</s>", **variables}

        def ours(prompt=add_generation_prompt, tools=tools, variables=variables):
            return template.render(messages, add_generation_prompt=prompt, tools=tools, variables=variables)

        try:
            expected = oracle(source, **context)
        except (jinja2.exceptions.TemplateError, TypeError):
            with pytest.raises(ChatTemplateError):
                ours()
        else:
            assert ours() == expected


FILTERS = [
    "{{ 'aXbXc'|replace('X', '-') }}{{ 'aXbXc'|replace('X', '-', 1) }}",
    "{{ 'ab'|replace('', '.') }}{{ nothing|replace('a', 'b') }}",
    "{{ [1, 'a', 0.5, none]|join }}{{ [1, 2]|join(', ') }}{{ 'abc'|join('-') }}",
    "{{ {'a': 1}|join }}{{ nothing|join('x') }}{{ range(3)|join('+') }}",
    "{{ [{'a': 1}, {'a': 2}]|join(', ', attribute='a') }}",
    "{{ 'a\n\nb\n'|indent }}|{{ 'a\nb'|indent(2, true) }}|{{ 'a\n\nb'|indent(2, blank=true) }}",
    "{{ 'a\nb'|indent('> ') }}|{{ 'a\r\nb'|indent(first=true) }}|{{ '\na'|indent(1) }}|{{ ''|indent }}",
    "{{ 'a\n'|indent(2, true, true) }}|{{ '\n'|indent(2, true) }}|{{ '\n\n'|indent(2, blank=true) }}",
    "{{ {'b': [1, true, none], 'a': '<é&>'}|tojson }}{{ {'b': 1, 'a': 2}|tojson(sort_keys=true) }}",
    "{{ {'b': 1, 'a': [2]}|tojson(indent=2) }}{{ 'é'|tojson(ensure_ascii=true) }}",
    "{{ [1, 2]|tojson(separators=[',', ':']) }}{{ messages|tojson }}",
    "{{ messages[0].content }}{{ strftime_now('%d %B %Y') }}",
    "{{ none }}{{ true }}{{ 1.0 }}{{ [none, 'a', false] }}{{ {'a': [1, none]} }}",
]


@pytest.mark.parametrize("source", FILTERS)
def test_filters_equal_jinja2(oracle, source):
    messages = [{"role": "user", "content": "x"}]
    assert ChatTemplate(source, clock=lambda: NOW).render(messages) == oracle(source, messages=messages)


def test_text_parts_are_joined_and_arguments_parsed():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert (
        ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "one\ntwo"
    )
    call = {"function": {"name": "f", "arguments": '{"a": [1, 2]}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    source = "{{ messages[0].tool_calls[0].function.arguments.a[1] }}"
    assert ChatTemplate(source).render(messages) == "2"
    assert call["function"]["arguments"] == '{"a": [1, 2]}'


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "an empty list"),
        ("hello", "got str"),
        (None, "NoneType"),
        (["hello"], r"messages\[0\]: expected an object"),
        ([USER, {"content": "x"}], r"messages\[1\]\.role: expected a string"),
        ([{"role": "user"}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": 3}], "got int"),
        ([{"role": "user", "content": None}], "NoneType"),
        ([{"role": "user", "content": "x", "tool_cals": []}], "did you mean 'tool_calls'"),
        ([{"role": "user", "content": "x", "name": 3}], r"\.name: expected a string"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "got 'image_url'"),
        ([{"role": "user", "content": ["x"]}], "got 'str'"),
        ([{"role": "user", "content": [{"type": "text", "txt": "x"}]}], "did you mean 'text'"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], r"content\[0\]\.text"),
        ([USER | {"tool_calls": "x"}], "tool_calls: expected a list"),
        ([USER | {"tool_calls": [{}]}], r"tool_calls\[0\]\.function"),
        ([USER | {"tool_calls": [{"function": {"arguments": "{"}}]}], "expected JSON"),
        ([USER | {"tool_calls": [{"function": {"arguments": "[" * 9999}}]}], "expected JSON"),
        ([USER | {"tool_calls": [{"function": {"arguments": "[" * 50 + "]" * 50}}]}], "levels of nesting"),
        ([USER | {"tool_calls": [{"function": {"f": object()}}]}], "expected a JSON value"),
    ],
)
def test_malformed_messages_are_refused(messages, said):
    with pytest.raises(ChatTemplateError, match=said):
        ChatTemplate("x").render(messages)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"enable_thinkin": True}, "did you mean 'enable_thinking'"),
        ({"messages": []}, "unknown template variable 'messages'"),
        ({"raise_exception": "x"}, "unknown template variable"),
        ({"tokenize": True}, "unknown template variable"),
        ({"documents": [object()]}, "expected a JSON value"),
        ({"documents": [{3: 1}]}, "strings as keys"),
    ],
)
def test_other_variables_are_refused(variables, said):
    with pytest.raises(ChatTemplateError, match=said):
        ChatTemplate("x").render([USER], variables=variables)


@pytest.mark.parametrize("tools", ["x", [1], {"a": 1}])
def test_malformed_tools_are_refused(tools):
    with pytest.raises(ChatTemplateError, match="tools: expected a list of JSON objects"):
        ChatTemplate("x").render([USER], tools=tools)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("\n{{ 1 + }}", "syntax error.*chat:2"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ missing() }}", "missing.*undefined"),
        ("{{ 'a'|missing }}", "No filter named .missing"),
        ("{{ [1]|join(1, 2, 3) }}", "positional"),
        ("{{ {'a': 1}|tojson(separators=3) }}", "TypeError"),
    ],
)
def test_failures_name_their_cause(source, said):
    with pytest.raises(ChatTemplateError, match=said):
        ChatTemplate(source).render([USER])


def test_long_conversations_have_fuel_enough():
    messages = [{"role": "user", "content": "x"}] * 20_000
    assert ChatTemplate(SMOLLM2).render(messages).count("<|im_start|>") == 20_002


def test_the_time_is_the_time_of_each_render():
    times = iter([datetime(2026, 3, 14), datetime(2027, 3, 14)])
    template = ChatTemplate("{{ strftime_now('%Y') }}", clock=lambda: next(times))
    assert [template.render([USER]), template.render([USER])] == ["2026", "2027"]


@pytest.mark.parametrize(
    "value", [0.5, float("inf"), 2**80, -1, True, None, "é\U0001f600\x00\n", [{"a": []}]]
)
def test_variables_arrive_as_they_are(oracle, value):
    source = "{{ thinking }}{{ thinking is string }}{{ thinking is none }}{{ thinking is number }}"
    expected = oracle(source, thinking=value, messages=[USER])
    assert ChatTemplate(source).render([USER], variables={"thinking": value}) == expected


@pytest.mark.parametrize(
    ("source", "content", "thinking"),
    [("x", "x", 10**5000), ("x", "x", ["\ud800"]), ("x", "a\ud800", 0), ("\ud800", "x", 0)],
    ids=["long number", "variable", "message", "template"],
)
def test_what_no_json_can_hold_is_refused(source, content, thinking):
    with pytest.raises(ChatTemplateError, match="valid Unicode and short numbers"):
        ChatTemplate(source).render([USER | {"content": content}], variables={"thinking": thinking})
