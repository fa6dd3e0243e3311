"""Hostile chat templates end quickly, in bounded memory, in an error or in harmless text."""

import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from template_samples import SMOLLM2

from octavo.errors import ChatTemplateError
from octavo.tokenizer import ChatTemplate, template_sandbox
from octavo.tokenizer.template_process import SHARED

MESSAGES = [{"role": "user", "content": "x"}]
HUGE = "{% set x = 'a' * 1000000 %}"
NAMESPACE = (
    "{% set ns = namespace(x=FIRST) %}{% for i in range(COUNT) %}{% set ns.x = NEXT %}{% endfor %}{{ ns.x }}"
)


def grown(first: str, count: int, following: str) -> str:
    """A template that builds a value up in a loop and writes it."""
    return NAMESPACE.replace("FIRST", first).replace("COUNT", str(count)).replace("NEXT", following)


# the sandbox refuses them or Python ends them, and the child lives on
REFUSED = {
    "long range": "{{ range(10**9) }}",
    "infinite macro": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "infinite recursive loop": "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "deep parentheses": "{{ " + "(" * 90000 + "1" + ")" * 90000 + " }}",
    "deep blocks": "{% if 1 %}" * 9000 + "{% endif %}" * 9000,
    "negation chain": "{{ " + "not " * 50000 + "1 }}",
    "long source": "a" * 10**6,
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.system('true') }}",
    "extends": "{% extends 'base.html' %}",
    "class walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class walk by filter": "{{ (''|attr('__class__')).__mro__ }}",
    "class walk by item": "{{ ''['__class__']['__mro__'] }}",
    "globals walk": "{{ raise_exception.__globals__['__builtins__']['eval']('1') }}",
    "clock walk": "{{ strftime_now.__globals__['sys'] }}",
    "generator walk": "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "macro walk": "{% macro f() %}{% endmacro %}{{ f._environment.globals }}",
    "loop walk": "{% for x in [1] %}{{ loop._iterator.x }}{{ loop.__class__.x }}{% endfor %}",
    "cycler walk": "{{ cycler.__init__.__globals__.os }}",
    "self walk": "{{ self._TemplateReference__context.environment }}",
    "format walk": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "mapped format walk": "{{ '{x.__class__.__mro__}'.format_map({'x': messages}) }}",
    "escaped format walk": "{{ ('{0.__class__.__mro__}'|safe).format(messages) }}",
    "attribute of a namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "made attribute of a namespace": "{{ namespace({'__class__': 1}) }}",
    "change of a message": "{{ messages.append(1) }}",
    "change of a dictionary": "{{ messages[0].update({'role': 'x'}) }}",
    "codec": "{{ 'x'.encode('rot13') }}{{ 'x'.encode('idna') }}{{ 'x'.encode('zlib_codec') }}",
}
# the limits of the child process end it
UNBOUNDED = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "long repetition": "{{ 'a' * 10**9 }}",
    "long list": "{{ [1] * 10**9 }}",
    "large power": "{{ 10 ** (10 ** 10) }}",
    "replace amplification": HUGE + "{{ x|replace('a', x)|replace('a', x) }}",
    "replace method": HUGE + "{{ x.replace('a', x).replace('a', x) }}",
    "huge indent": "{{ ('a\n' * 10000)|indent(10**9) }}",
    "format width": "{{ '%1000000000d'|format(1) }}",
    "format method": "{{ '{:>1000000000}'.format(1) }}",
    "centre": "{{ 'a'.center(10**9) }}{{ 'a'|center(10**9) }}",
    "slice filling": "{{ range(3)|slice(1000000000, 'x')|list }}",
    "operator chain": "{{ " + "1+" * 90000 + "1 }}",
    "doubling": grown("'a' * 1000", 60, "ns.x ~ ns.x"),
    "lists": grown("[1]", 60, "ns.x + ns.x"),
    "captured block": "{% set x %}{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}{{ x }}",
    "output": "{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}",
}
LIMITS = r"processor time|at most 5 s|memory|too large|characters|recursion depth"
SLOW_FILTERS = "{% for i in range(9999) %}{% set x = range(99999)|sort|unique|list %}{% endfor %}"
# text without a word of Python's insides
HARMLESS = {
    "filter walk": "{{ messages|map(attribute='__class__')|list|length }}",
    "joined class": "{{ [messages]|join(attribute='__class__') }}",
    "method walk": "{{ strftime_now.__self__ is defined }}{{ messages.__class__ }}",
    "namespace in itself": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_the_sandbox_refuses_is_an_error(name):
    render_good()
    pid = SHARED.pid
    with pytest.raises(ChatTemplateError, match="chat template failed"):
        ChatTemplate(REFUSED[name]).render(MESSAGES)
    assert SHARED.pid == pid


@pytest.mark.parametrize("name", list(HARMLESS))
def test_names_of_pythons_insides_lead_nowhere(name):
    text = ChatTemplate(HARMLESS[name]).render(MESSAGES)
    assert len(text) < 100, text[:200]
    assert not any(word in text for word in ("class '", "module", "function")), text


@pytest.mark.parametrize("name", list(UNBOUNDED))
def test_unbounded_templates_cannot_harm_this_process(name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    render_good()
    with pytest.raises(ChatTemplateError, match=LIMITS):
        ChatTemplate(UNBOUNDED[name]).render(MESSAGES)
    render_good()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


ESCAPED = """
import os, runpy, socket, subprocess, sys
runpy.run_path(sys.argv[1])["lock_up"]()
def refused(act):
    try:
        act()
    except BaseException as error:
        return "only makes text" in str(error)
print([
    refused(lambda: open("/etc/passwd")),
    refused(lambda: open("/tmp/x", "w")),
    refused(lambda: os.system("true")),
    refused(lambda: os.listdir("/")),
    refused(lambda: os.remove("/tmp/x")),
    refused(lambda: os.kill(1, 0)),
    refused(lambda: socket.socket()),
    refused(lambda: subprocess.run(["true"])),
    refused(lambda: os.fork()),
    refused(lambda: __import__("ctypes")),
])
"""


def test_code_that_escaped_from_the_sandbox_finds_nothing():
    """Python code in a process that is locked up as the child is."""
    command = [sys.executable, "-c", ESCAPED, template_sandbox.__file__]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed.strip() == str([True] * 10)


def test_the_child_gets_no_secrets_of_the_environment(monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "secret-key")
    SHARED.close()
    render_good()
    environ = Path(f"/proc/{SHARED.pid}/environ")
    if not environ.exists():
        pytest.skip("this system does not show a process's environment")
    assert b"secret-key" not in environ.read_bytes()
    limits = Path(f"/proc/{SHARED.pid}/limits").read_text()
    assert re.search(r"Max open files +0 +0", limits)


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
        ChatTemplate(UNBOUNDED["long list"]).render(MESSAGES)
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
