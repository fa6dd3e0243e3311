"""Each turn of a conversation is in its prompt, or it is refused by name."""

# Templates have long lines.
# ruff: noqa: E501

import pytest
from template_families import CONVERSATIONS, FAMILIES, TOOL, call, result
from template_samples import CHATML, SMOLLM2

from octavo.errors import ChatTemplateError
from octavo.tokenizer import ChatTemplate
from octavo.tokenizer.template_process import SHARED

USER = {"role": "user", "content": "x"}
KNOWN = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}[{{ m.role }}]{{ m.content }}"
    "{% endif %}{% endfor %}"
)
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}[S]{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
LAST_SYSTEM = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}"
    "{% endif %}{% endfor %}{{ ns.system }}{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('only user') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def turn(role: str, content: str = "RULE") -> dict:
    return {"role": role, "content": content}


def prompt(source: str, *messages: dict, **settings) -> str:
    return ChatTemplate(source).prompt(messages, **settings).text


@pytest.mark.parametrize("source", [KNOWN, FIRST_SYSTEM, STRICT, SMOLLM2, CHATML], ids=range(5))
def test_developers_are_the_system_where_a_template_knows_none(source):
    assert prompt(source, turn("developer"), USER) == prompt(source, turn("system"), USER)


def test_developers_stay_where_a_template_knows_them():
    source = KNOWN.replace("['system'", "['developer', 'system'")
    assert prompt(source, turn("developer"), USER) == "[developer]RULE[user]x"
    said_only = "{# for developers #}" + KNOWN
    assert prompt(said_only, turn("developer"), USER) == "[system]RULE[user]x"
    refused = STRICT.replace("'only user'", "'no developer'")
    assert prompt(refused, turn("developer"), USER) == "[system]RULE[user]x"


@pytest.mark.parametrize(
    ("source", "messages", "named"),
    [
        (KNOWN, [USER, turn("tool")], r"messages\[1\].*'tool'"),
        (KNOWN, [turn("function"), USER], r"messages\[0\].*'function'"),
        (FIRST_SYSTEM, [turn("system", "A"), turn("system"), USER], r"messages\[1\].*'system'"),
        (FIRST_SYSTEM, [turn("system", "A"), turn("developer"), USER], r"messages\[1\].*'developer'"),
        (FIRST_SYSTEM, [USER, turn("assistant", "y"), turn("system"), USER], r"messages\[2\].*'system'"),
        (FIRST_SYSTEM, [turn("system", "x" * 30), turn("system", "x" * 30), USER], r"messages\[1\]"),
        (LAST_SYSTEM, [turn("system"), USER, turn("system", "B"), USER], r"messages\[0\].*'system'"),
        ("{{ messages[-1].content }}", [turn("user", "RULE"), turn("assistant"), USER], r"messages\[0\].*'user'"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", [USER, turn("assistant")], "'assistant'"),
        ("nothing", [USER], r"messages\[0\].*'user'"),
    ],
)  # fmt: skip
def test_a_turn_that_leaves_no_trace_is_refused_by_name(source, messages, named):
    for _ in range(2):  # what is learnt about a template changes nothing
        with pytest.raises(ChatTemplateError, match=f"{named}|leaves out.*{named}"):
            prompt(source, *messages)
    with pytest.raises(ChatTemplateError, match="leaves out"):
        prompt(source, *(m | {"content": f"{m['content']} {'long ' * 9}"} for m in messages))


@pytest.mark.parametrize(
    "role", ["banana", "User", "SYSTEM", "", "assistant ", "content", "model", "<|im_end|>"]
)
@pytest.mark.parametrize("source", [KNOWN, SMOLLM2, CHATML, STRICT], ids=range(4))
def test_unknown_roles_are_refused_by_name(source, role):
    with pytest.raises(ChatTemplateError, match=r"messages\[1\]\.role: expected one of system, .*got"):
        prompt(source, USER, turn(role))


def test_a_templates_own_roles_are_known():
    source = "{% for m in messages %}{% set role = m['role'] %}{% if role == 'observation' or role in [\"ipython\"] %}<o>{% endif %}{{ m.content }}{% endfor %}"
    assert prompt(source, USER, turn("observation"), turn("ipython")) == "x<o>RULE<o>RULE"
    with pytest.raises(ChatTemplateError, match="expected one of"):
        prompt(source, USER, turn("banana"))


@pytest.mark.parametrize("conversation", list(CONVERSATIONS))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_no_family_loses_a_turn_or_is_refused_without_need(family, conversation):
    """What it refuses is a second system turn, a tool's result or what the template itself refuses."""
    template, messages = (
        ChatTemplate(FAMILIES[family], bos_token="<s>", eos_token="</s>"),
        CONVERSATIONS[conversation],
    )
    try:
        text = template.prompt(messages, tools=[TOOL]).text
    except ChatTemplateError as error:
        if "failed" not in str(error):
            assert family in ("ends", "marked", "loops") or conversation in ("second system", "call", "calls")
    else:
        for message in (message for message in messages if "tool_calls" not in message):
            content = message["content"].split("</think>")[-1].replace("/no_think", "").split()
            assert not content or content[0] in text.replace("\\n", " ") or family in ("loops", "command_r")


def test_a_system_turn_that_waits_for_a_users_is_not_lost():
    """Some templates show it only while a user's turn is the last."""
    source = "{% for m in messages %}{% if m.role == 'user' %}{% if loop.last %}{{ messages[0].content }}{% endif %}[u]{{ m.content }}{% elif m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endif %}{% endfor %}"
    calls = {"role": "assistant", "content": "", "tool_calls": [call(1)]}
    assert prompt(source, turn("system"), USER) == "RULE[u]x"
    assert prompt(source, turn("system"), USER, calls, result(1, "20")) == "[u]x[assistant]weather[tool]20"


def test_calls_that_a_template_leaves_out_are_written_into_the_turn():
    calls = {"role": "assistant", "content": None, "tool_calls": [call(1), call(2)]}
    text = prompt(SMOLLM2, USER, calls | {"content": ""}, result(1, "20"))
    assert text.count('<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich') == 2
    beside = prompt(SMOLLM2, USER, calls | {"content": "So:"}, result(1, "20"))
    assert 'So:\n<tool_call>\n{"name"' in beside
    shown = prompt(CHATML, USER, calls, result(1, "20"), tools=[TOOL])
    assert shown == ChatTemplate(CHATML).render([USER, calls, result(1, "20")], tools=[TOOL])


@pytest.mark.parametrize("content", ["", " \n", [], "<think>\nhm\n</think>\n\n"])
def test_turns_that_say_nothing_are_not_missed(content):
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1]|trim }}{% endfor %}"
    assert prompt(source, USER, turn("assistant", content), USER) == "[user]x[assistant][user]x"


def test_content_that_templates_change_is_not_missed():
    source = "{% for m in messages %}{{ m.content|upper|tojson }}{{ m.content|length }}{% endfor %}"
    assert prompt(source, turn("user", 'a "b" and what is more')) == '"A \\"B\\" AND WHAT IS MORE"22'


def test_a_conversation_is_rendered_once(monkeypatch):
    """Twice only if it is the first of its shape and its texts are too short to tell."""
    rendered = []
    render = SHARED.render
    monkeypatch.setattr(SHARED, "render", lambda request: rendered.append(request) or render(request))
    template = ChatTemplate(CHATML)
    long = [turn("system", "Be as brief as you can."), turn("user", "What is the weather like?")]
    template.prompt(long)
    assert len(rendered) == 1
    for number in range(5):
        template.prompt([turn("user", str(number))])
    assert len(rendered) == 1 + 2 + 4
