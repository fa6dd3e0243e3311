"""Renders a template that is not trusted in a child process with limits on time and memory."""

import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime

import msgspec

from octavo.tokenizer import template_sandbox
from octavo.tokenizer.template_sandbox import RenderError

# CPU time is what the child limits; this is for a machine too busy to give it any
WALL_SECONDS = 5.0


class _Reply(msgspec.Struct):
    text: str | None = None
    error: str | None = None


def render_in_child(source: str, context: Mapping[str, object], *, fuel: int, now: datetime) -> str:
    """Render one template in a child process of one second and a fixed amount of memory.

    Whatever the template does, this process is safe: the child may be killed, may run out of memory or
    overflow its stack. It starts anew for each call, which takes about a tenth of a second.

    Args:
        source: the Jinja template.
        context: variables by name, made of JSON values.
        fuel: number of template instructions allowed.
        now: what `strftime_now` formats.

    Raises:
        RenderError: the template fails, refuses the messages, or exceeds a bound.
    """
    request = {"source": source, "context": dict(context), "fuel": fuel, "now": now.isoformat()}
    try:
        child = subprocess.run(
            [sys.executable, "-P", template_sandbox.__file__],
            input=msgspec.json.encode(request),
            capture_output=True,
            timeout=WALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RenderError(f"it took longer than {WALL_SECONDS:g} s") from error
    if child.returncode != 0:
        raise RenderError(_cause(child.returncode))
    reply = msgspec.json.decode(child.stdout, type=_Reply)
    if reply.text is None:
        raise RenderError(reply.error)
    return reply.text


def _cause(return_code: int) -> str:
    if return_code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it took more than {template_sandbox.CHILD_CPU_SECONDS} s of processor time"
    mebibytes = template_sandbox.CHILD_MEMORY_BYTES // 2**20
    return f"it exceeded {mebibytes} MiB of memory or its stack (exit code {return_code})"
