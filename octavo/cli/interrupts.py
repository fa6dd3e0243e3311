"""Ctrl-C while a command starts. This imports next to nothing: before it runs, Python prints a traceback."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

EXIT_CODE = 130


def leave_on_interrupt() -> None:
    """From now on Ctrl-C ends the process at once, with exit code 130 and nothing printed.

    An exception might come up where it is lost or printed: in an import that tries several modules, in a
    destructor, in a callback. Where Ctrl-C means something else already (a job in the background ignores it)
    that stays.
    """
    _replace(signal.default_int_handler, _leave)


def raise_on_interrupt() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt again."""
    _replace(_leave, signal.default_int_handler)


def _replace(
    old: Callable[[int, FrameType | None], object], new: Callable[[int, FrameType | None], object]
) -> None:
    if signal.getsignal(signal.SIGINT) is old:
        # Signals reach the main thread only, and others may not set handlers.
        with suppress(ValueError):
            signal.signal(signal.SIGINT, new)


def _leave(number: int, frame: FrameType | None) -> None:
    if os.isatty(2):
        # A progress bar is on the line, and has hidden the cursor.
        os.write(2, b"\x1b[?25h\n")
    os._exit(EXIT_CODE)
