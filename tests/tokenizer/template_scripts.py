"""Python processes of their own, whose chat templates are rendered by children of theirs."""

import os
import subprocess
import sys
from pathlib import Path

SLOW = "{% for i in range(9999) %}{% set x = range(99999)|sort|unique|list %}{% endfor %}"
# what scripts begin with: `ask(text)` renders with the shared child
SCRIPT = f"""
import os, signal, sys, threading, time
from octavo.tokenizer import ChatTemplate
from octavo.tokenizer.template_process import SHARED
def ask(text):
    rendered = ChatTemplate("{{{{ messages[0].content }}}}!").render([{{"role": "user", "content": text}}])
    assert rendered == text + "!", rendered
def ask_slow():
    ChatTemplate({SLOW!r}).render([{{"role": "user", "content": "x"}}])
"""


def is_gone(pid: int) -> bool:
    """Whether a process has ended, even if nobody has waited for it yet."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except ProcessLookupError:
        return True
    except FileNotFoundError:  # it ended just now, or the system has no /proc
        return Path("/proc/self").exists()


def start_script(code: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_script(code: str) -> str:
    """Run a script to its end and return what it printed; writing to stderr is a failure."""
    with start_script(code) as script:
        printed, errors = script.communicate(timeout=60)
    assert script.returncode == 0, errors
    assert errors == ""
    return printed
