"""How the process of a command ends."""

import atexit
import os
import sys
import threading
from contextlib import suppress

from octavo.cli.streams import settle_errors

_at_once = threading.Event()


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
