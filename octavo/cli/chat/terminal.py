"""Reads messages from a terminal: with editing, several lines, completion and what was typed before."""

from collections.abc import Iterable, Iterator
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle

from octavo.cli.chat.commands import SETTINGS, Commands
from octavo.cli.chat.history import history_of


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
        # Below the text, as shells do: no menu needs room on the screen.
        complete_style=CompleteStyle.READLINE_LIKE,
        complete_while_typing=False,
        reserve_space_for_menu=0,
        key_bindings=_bindings(),
        **streams,
    )


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    # A terminal in its usual mode, as while an answer is written, makes Ctrl-J of Enter.
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
