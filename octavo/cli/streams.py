"""Makes the standard streams usable, even if they are closed, full or of a narrow encoding."""

import atexit
import errno
import io
import json
import os
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import TextIO

from octavo.errors import PromptError

_at_once = threading.Event()


def prepare_streams(*, needs_output: bool = True) -> None:
    """Prepare the standard streams.

    A closed standard input becomes empty. A closed standard error drops its text, and so does a closed
    standard output if the command does not need it. Characters that an output's encoding lacks are written as
    escapes. Invalid bytes in the input become lone surrogates, which the commands refuse.

    Raises:
        OSError: standard output is closed, and needed.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None and not needs_output:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        raise OSError(errno.EBADF, "closed")
    for stream, errors in (
        (sys.stdin, "surrogateescape"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)


def check_text(texts: Iterable[str], place: str, encoding: str) -> None:
    """Refuse bytes that are not text, before anything slow begins.

    Args:
        texts: prompts or messages.
        place: where they come from.
        encoding: what their bytes should have been.

    Raises:
        PromptError: one holds a lone surrogate, which stands for a byte that could not be decoded.
    """
    for number, text in enumerate(texts, start=1):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise PromptError(f"text {number} of {place} must be {encoding} text, got {text!a}")


def say(line: str) -> None:
    """Print a line that nobody has to read; if it cannot be written, all output is dropped."""
    try:
        print(line, flush=True)
    except OSError:
        drop_output()


def drop_output() -> None:
    """Discard buffered output, or Python would try to write it at exit and complain."""
    _drop(sys.stdout)


def settle_errors() -> None:
    """Write buffered errors, or discard them, or Python would try to at exit and change the exit code."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except (OSError, ValueError):
        _drop(sys.stderr)


def _drop(stream: TextIO | None) -> None:
    if stream is None:
        return
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_json(line: str) -> None:
    """Print a line of JSON; use JSON's own escapes for characters that the output's encoding lacks."""
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        line = json.dumps(json.loads(line))
    print(line)


def leave_at_once() -> None:
    """Let `leave` end this process without taking the interpreter apart first.

    Threads of the HTTP server's library outlive the server, and abort the process if they want to call
    Python while it is taken apart: exit code 134 instead of the command's.
    """
    _at_once.set()


def leave(exit_code: int) -> None:
    """End the command; returns if the code is 0 and nothing forbids to take the interpreter apart.

    Raises:
        SystemExit: with another code.
    """
    if _at_once.is_set():
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(exit_code)
    settle_errors()
    if exit_code:
        sys.exit(exit_code)
