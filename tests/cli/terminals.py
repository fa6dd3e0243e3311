"""A command on a terminal of its own, as a person has it: keys go in, text comes out."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Colours, cursor moves and modes.
_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[=>])")


class Terminal:
    """What the command wrote, and its keyboard."""

    def __init__(self, screen: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._screen = screen
        self._written = b""

    def press(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def until(self, text: str) -> str:
        """Read until a text was written; return what came before it, and forget both."""
        while True:
            shown = _ESCAPES.sub("", self._written.decode(errors="replace"))
            if text in shown:
                before, _, after = shown.partition(text)
                self._written = after.encode()
                return before
            try:
                self._written += os.read(self._screen, 4096)
            except OSError:
                raise AssertionError(f"the command ended before {text!r}: {shown!r}") from None


@contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    """Run `octavo` with arguments on a terminal; Ctrl-C reaches it as it does a shell's foreground job."""
    screen, its_end = pty.openpty()
    # The first terminal that a session opens becomes its own.
    code = 'exec "$@" <"$0" >"$0" 2>&1'
    command = ["sh", "-c", code, os.ttyname(its_end), sys.executable, "-m", "octavo", *arguments]
    variables = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"} | environment
    with subprocess.Popen(
        command, start_new_session=True, env=variables, stdin=subprocess.DEVNULL
    ) as process:
        try:
            yield Terminal(screen, process)
        finally:
            process.kill()
            os.close(screen)
            os.close(its_end)
