"""Ctrl-C while a command starts. This file imports little: until it runs, Ctrl-C prints a traceback."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

EXIT_CODE = 130


def leave_on_interrupt() -> None:
    """Let Ctrl-C end the process at once from now on, with exit code 130 and nothing printed.

    A KeyboardInterrupt could be swallowed or printed by an import, a destructor or a callback. If Ctrl-C has
    another handler (a background job ignores it), that handler stays.
    """
    _replace(signal.default_int_handler, _leave)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    _replace(_leave, signal.default_int_handler)


def _replace(
    old: Callable[[int, FrameType | None], object], new: Callable[[int, FrameType | None], object]
) -> None:
    if signal.getsignal(signal.SIGINT) is old:
        # Only the main thread may set signal handlers, and only it receives signals.
        with suppress(ValueError):
            signal.signal(signal.SIGINT, new)


def _leave(number: int, frame: FrameType | None) -> None:
    if os.isatty(2):
        # A progress bar may have hidden the cursor.
        os.write(2, b"\x1b[?25h\n")
    os._exit(EXIT_CODE)
