"""The standard streams, whatever the process was started with: closed, full, or of a narrow encoding."""

import errno
import io
import json
import os
import sys
from contextlib import suppress


def prepare_streams() -> None:
    """Make the streams such that every command can use them.

    A closed standard input is an empty one, and what goes to a closed standard error is dropped. Characters
    that an output's encoding lacks are written as escapes. Input that is not of its encoding comes as lone
    surrogates, which whoever reads text refuses.

    Raises:
        OSError: standard output is closed.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        raise OSError(errno.EBADF, "closed")
    for stream, errors in (
        (sys.stdin, "surrogateescape"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)


def drop_output() -> None:
    """Send what standard output still holds nowhere: Python would try to write it at exit, and complain."""
    if sys.stdout is None:
        return
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(line: str) -> None:
    """Print a line of JSON; characters that the output's encoding lacks get JSON's own escapes."""
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        line = json.dumps(json.loads(line))
    print(line)
