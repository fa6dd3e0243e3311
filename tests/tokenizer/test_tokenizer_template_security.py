"""Hostile chat templates end quickly, in bounded memory, in an error or in harmless text."""

import resource
import time

import pytest
from template_samples import SMOLLM2

from octavo.errors import ChatTemplateError
from octavo.tokenizer import ChatTemplate
from octavo.tokenizer.template_process import SHARED

MESSAGES = [{"role": "user", "content": "x"}]
HUGE = "{% set x = 'a' * 1000000 %}"
NAMESPACE = (
    "{% set ns = namespace(x=FIRST) %}{% for i in range(COUNT) %}{% set ns.x = NEXT %}{% endfor %}{{ ns.x }}"
)


def grown(first: str, count: int, following: str) -> str:
    """A template that builds a value up in a loop and writes it."""
    return NAMESPACE.replace("FIRST", first).replace("COUNT", str(count)).replace("NEXT", following)


# refused or stopped by the bounds of the template engine and of the filters
BOUNDED = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "long repetition": "{{ 'a' * 10**9 }}",
    "repeated repetition": "{{ ('a' * 100000) * 100000 }}",
    "long list": "{{ [1] * 10**9 }}",
    "long range": "{{ range(10**9) }}",
    "large power": "{{ 10 ** 10 ** 10 }}",
    "replace amplification": HUGE + "{{ x|replace('a', x)|replace('a', x) }}",
    "replace of nothing": HUGE + "{{ x|replace('', x) }}",
    "huge join": HUGE + "{{ range(1000)|join(x) }}",
    "huge indent": "{{ ('a\n' * 10000)|indent(10**9) }}",
    "indent by text": HUGE + "{{ ('a\n' * 10000)|indent(x) }}",
    "huge json indent": "{{ range(10000)|tojson(indent=10**9) }}",
    "format width": "{{ '%1000000000d'|format(1) }}",
    "batch filling": "{{ range(3)|batch(1000000000, 'x')|list }}",
    "slice filling": "{{ range(3)|slice(1000000000, 'x')|list }}",
    "infinite macro": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "infinite recursive loop": "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "deep parentheses": "{{ " + "(" * 90000 + "1" + ")" * 90000 + " }}",
    "deep blocks": "{% if 1 %}" * 9000 + "{% endif %}" * 9000,
    "operator chain": "{{ " + "1+" * 90000 + "1 }}",
    "operator chain after a dictionary": "{{ {'a': {'b': 1}} ~ " + "1+" * 90000 + "1 }}",
    "operator chain after a string": "{{ '}}' ~ " + "1+" * 90000 + "1 }}",
    "negation chain": "{{ " + "not " * 50000 + "1 }}",
    "filter chain": "{{ 1" + "|string" * 30000 + " }}",
    "long source": "a" * 10**6,
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.system('true') }}",
    "extends": "{% extends 'base.html' %}",
    "class walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals walk": "{{ raise_exception.__globals__['__builtins__']['eval']('1') }}",
    "method walk": "{{ strftime_now.__self__.__class__.__init__ }}{{ strftime_now.__self__ is defined }}",
    "filter walk": "{{ messages|map(attribute='__class__')|list|tojson }}",
    "joined class": "{{ [messages]|join(attribute='__class__') }}",
}
# what operators and methods can do needs the limits of a process of its own
UNBOUNDED = {
    "doubling": grown("'a' * 1000", 60, "ns.x ~ ns.x"),
    "lists": grown("[1]", 60, "ns.x + ns.x"),
    "captured block": "{% set x %}{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}{{ x }}",
    "growing macro": "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('a' * 1000) }}",
    "format method": "{{ '{:>1000000000}'.format(1) }}",
    "namespace in itself": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "doubling text": grown("[1]", 60, "[ns.x, ns.x]"),
    "replace method": HUGE + "{{ x.replace('a', x).replace('a', x) }}",
    "output": "{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}",
}
SLOW_FILTERS = "{% for i in range(9999) %}{% set x = range(99999)|sort|unique|list %}{% endfor %}"
DEEP_LIST = grown("[]", 90000, "[ns.x]")
HARMLESS = {"filter walk", "joined class"}


@pytest.mark.parametrize("name", list(BOUNDED))
def test_bounded_templates(name):
    """They end in an error or in harmless text, within the limits of the child process, which lives on."""
    render_good()
    pid = SHARED.pid
    try:
        text = ChatTemplate(BOUNDED[name]).render(MESSAGES)
    except ChatTemplateError:
        pass
    else:
        assert name in HARMLESS
        assert len(text) < 100, text[:200]
        assert not any(word in text for word in ("class '", "module", "function")), text
    assert SHARED.pid == pid


@pytest.mark.parametrize("name", list(UNBOUNDED))
def test_unbounded_templates_cannot_harm_this_process(name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    render_good()
    with pytest.raises(
        ChatTemplateError, match=r"processor time|at most 5 s|memory|fuel|too large|characters"
    ):
        ChatTemplate(UNBOUNDED[name]).render(MESSAGES)
    render_good()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def render_good() -> None:
    """A template without fault gets its text, whatever was rendered before; no cache has this one."""
    messages = [{"role": "user", "content": f"{time.perf_counter_ns()} {{{{ 7 * 7 }}}}"}]
    text = ChatTemplate(SMOLLM2).render(messages, add_generation_prompt=False)
    assert text.endswith(f"<|im_start|>user\n{messages[0]['content']}<|im_end|>\n")


def test_processor_time_is_limited():
    start = time.perf_counter()
    with pytest.raises(ChatTemplateError, match=r"at most 1 s of processor time"):
        ChatTemplate(SLOW_FILTERS).render(MESSAGES)
    assert time.perf_counter() - start > 0.9
    render_good()


def test_memory_is_limited():
    with pytest.raises(ChatTemplateError, match=r"at most 768 MiB of memory"):
        ChatTemplate(DEEP_LIST).render(MESSAGES)
    render_good()


def test_long_causes_are_cut_short():
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(HUGE + "{{ raise_exception(x) }}").render(MESSAGES)
    assert 9_000 < len(str(caught.value)) < 11_000


def test_message_text_is_never_a_template():
    text = "{{ 7 * 7 }}{% for i in range(10) %}x{% endfor %}"
    rendered = ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": text}])
    assert rendered == text


def test_long_prompts_are_bounded():
    with pytest.raises(ChatTemplateError, match="characters"):
        ChatTemplate("{{ messages[0].content }}" * 9).render([{"role": "user", "content": "a" * 10**6}])
