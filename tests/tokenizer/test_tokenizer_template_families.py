"""Chat templates render as in transformers, construct by construct and family by family."""

from datetime import datetime

import pytest
from template_expressions import EXPRESSIONS, STATEMENTS
from template_families import ARGUMENTS, CONVERSATIONS, FAMILIES, TOOL, USER
from template_samples import transformers_at

from octavo.errors import ChatTemplateError
from octavo.tokenizer import ChatTemplate

NOW = datetime(2026, 3, 4, 15, 9, 26)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


@pytest.fixture
def oracle(monkeypatch):
    """Return transformers' text, or None where it fails."""
    templates = transformers_at(NOW, monkeypatch)

    def render(source, messages, tools, **variables):
        try:
            return templates.render_jinja_template(
                [messages], tools=tools, chat_template=source, **TOKENS, **variables
            )[0][0]
        except Exception:
            return None

    return render


def ours(source, messages, tools, *, add_generation_prompt=True, **variables):
    template = ChatTemplate(source, special_tokens=TOKENS, clock=lambda: NOW)
    try:
        return template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
        )
    except ChatTemplateError:
        return None


SETTINGS = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False, "enable_thinking": False},
    {"add_generation_prompt": True, "documents": [{"title": "T", "text": "x"}], "reasoning_effort": "low"},
]


@pytest.mark.parametrize("conversation", list(CONVERSATIONS))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_families_render_as_in_transformers(oracle, family, conversation):
    source, messages = FAMILIES[family], CONVERSATIONS[conversation]
    for settings in SETTINGS:
        for tools in (None, [TOOL], [TOOL, TOOL]):
            assert ours(source, messages, tools, **settings) == oracle(source, messages, tools, **settings)


def test_families_render_most_conversations():
    """Or else the test above would compare errors."""
    rendered = [ours(s, c, [TOOL]) for s in FAMILIES.values() for c in CONVERSATIONS.values()]
    assert sum(text is not None for text in rendered) > 0.85 * len(rendered)


MESSAGES = [
    {
        "role": "assistant",
        "content": "x",
        "tool_calls": [{"function": {"name": "f", "arguments": ARGUMENTS}}],
    },
    USER,
]


def test_expressions_are_pythons(oracle):
    """Each alone would take a process's round trip; a wrong one is named."""
    sources = [f"{{{{ {expression} }}}}" for expression in EXPRESSIONS] + STATEMENTS
    got = {source: ours(source, MESSAGES, None) for source in sources}
    wanted = {source: oracle(source, MESSAGES, None, add_generation_prompt=True) for source in sources}
    assert {s: (got[s], wanted[s]) for s in sources if got[s] != wanted[s]} == {}
    assert sum(text is None for text in wanted.values()) < 0.2 * len(wanted)


def test_reasoning_has_both_names(oracle):
    source = "{{ messages[0].thinking }}|{{ messages[0].reasoning_content }}"
    for name in ("thinking", "reasoning_content"):
        messages = [{"role": "assistant", "content": "x", name: "why"}]
        assert ours(source, messages, None) == oracle(source, messages, None) == "why|why"
