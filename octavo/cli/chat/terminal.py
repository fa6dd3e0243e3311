"""Reads messages from a terminal: with editing, several lines, completion and a private history."""

import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle

from octavo.cli.chat.commands import SETTINGS, Commands

MAX_TEXTS = 1000
_MAX_BYTES = 1 << 20


def history_of(keep: bool) -> History:
    """Return the history in the user's file, or one that ends with this chat if `keep` is false.

    A file that cannot be used, or belongs to somebody else, is named on standard error and ignored.
    """
    if not keep:
        return InMemoryHistory()
    path = history_path()
    try:
        return FileHistory(path)
    except OSError as error:
        print(f"octavo: warning: {path} is not used: {error.strerror or error}", file=sys.stderr)
        return InMemoryHistory()


def history_path() -> Path:
    """Return $XDG_STATE_HOME/octavo/chat_history, or ~/.local/state/octavo/chat_history."""
    base = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification says to ignore relative paths.
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".local" / "state"
    return root / "octavo" / "chat_history"


class FileHistory(History):
    """Earlier input, one JSON string a line, the newest last; at most MAX_TEXTS and a megabyte.

    Raises:
        OSError: the file cannot be read or written, or is a link, a folder or another user's.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._texts = self._shortened()

    def load_history_strings(self) -> Iterable[str]:
        """Yield what was typed before, the newest first."""
        return reversed(self._texts)

    def store_string(self, string: str) -> None:
        """Append a text; another chat may do so at the same time."""
        try:
            with os.fdopen(_open(self._path, os.O_WRONLY | os.O_APPEND), "wb", buffering=0) as file:
                file.write(_line(string))
        except OSError as error:
            print(f"octavo: warning: {self._path}: {error.strerror or error}", file=sys.stderr)

    def _shortened(self) -> list[str]:
        """Read the newest texts, and drop older ones from the file."""
        with os.fdopen(_open(self._path, os.O_RDONLY), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _MAX_BYTES))
            lines = file.read(_MAX_BYTES).splitlines()
        # The first line may have lost its beginning.
        kept = lines[size > _MAX_BYTES :][-MAX_TEXTS:]
        if len(kept) < len(lines):
            temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            with os.fdopen(_open(temporary, os.O_WRONLY | os.O_TRUNC), "wb") as file:
                file.writelines(line + b"\n" for line in kept)
            temporary.replace(self._path)
        return [text for text in map(_text, kept) if text]


def _open(path: Path, flags: int) -> int:
    """Open a file that is the user's own, and take from others the right to read it."""
    handle = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(handle)
        raise OSError("expected a file of your own")
    if status.st_mode & 0o077:
        os.fchmod(handle, 0o600)
    return handle


def _line(text: str) -> bytes:
    return json.dumps(text).encode() + b"\n"


def _text(line: bytes) -> str:
    """Return a line's text; a line that something else wrote has none."""
    try:
        found = json.loads(line)
    except ValueError:
        return ""
    return found if isinstance(found, str) else ""


def edited_texts(commands: Commands, keep: bool) -> Iterator[str]:
    """Yield what the user enters, until Ctrl-D.

    Args:
        commands: what Tab completes.
        keep: read and write the file of what was typed before.
    """
    session = make_session(commands, keep)
    while True:
        try:
            text = session.prompt().strip()
        except KeyboardInterrupt:
            print("Ctrl-D or /exit leaves.")
            continue
        except EOFError:
            return
        if text:
            yield text


def make_session(commands: Commands, keep: bool, **streams: Any) -> PromptSession[str]:
    """Return the session; `streams` may name an input and an output that are not the terminal."""
    return PromptSession(
        "> ",
        prompt_continuation="  ",
        multiline=True,
        history=history_of(keep),
        completer=_Completer(commands),
        # Completions are listed below the text, as in shells: no menu needs room on the screen.
        complete_style=CompleteStyle.READLINE_LIKE,
        complete_while_typing=False,
        reserve_space_for_menu=0,
        key_bindings=_bindings(),
        **streams,
    )


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    # In its usual mode, as while an answer is written, a terminal sends Ctrl-J for Enter.
    @bindings.add("enter")
    @bindings.add("c-j")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\" and not buffer.document.text_after_cursor:
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("escape", "c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return bindings


class _Completer(Completer):
    """Completes the names of commands and settings, and paths."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        name, space, argument = text.partition(" ")
        if not text.startswith("/") or "\n" in text:
            return
        if not space:
            yield from _matching(name, self._commands.names)
        elif name == "/set":
            yield from _matching(argument, SETTINGS)
        elif name in ("/save", "/load"):
            yield from self._paths.get_completions(Document(argument), complete_event)


def _matching(begun: str, names: Iterable[str]) -> Iterator[Completion]:
    for name in names:
        if name.startswith(begun):
            yield Completion(name, start_position=-len(begun))
