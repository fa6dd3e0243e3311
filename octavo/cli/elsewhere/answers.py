"""What to say to an option or a command that Octavo does not have."""

from collections.abc import Iterable, Iterator, Mapping
from textwrap import wrap

from cyclopts import App, CycloptsError, UnknownCommandError, UnknownOptionError

from octavo.cli.elsewhere.llama_cpp import LLAMA_CPP
from octavo.cli.elsewhere.ollama import COMMANDS, MODELFILE, VARIABLES
from octavo.cli.elsewhere.rows import Row
from octavo.cli.elsewhere.vllm import VLLM
from octavo.errors import suggest

OPTIONS: Mapping[str, tuple[Row, ...]] = {"vLLM": VLLM, "llama.cpp": LLAMA_CPP}
TABLES: Mapping[str, tuple[Row, ...]] = {
    "vllm serve": VLLM,
    "llama-server": LLAMA_CPP,
    "Ollama's variables": VARIABLES,
    "Ollama's Modelfile": MODELFILE,
    "command": COMMANDS,
}
"""The tables of docs/coming-from-a-server.md, by the heading of their first column."""


def explained(error: CycloptsError, root: App) -> str:
    """Return the message of an error of the command line; what is unknown is answered, if somebody has it."""
    if isinstance(error, UnknownOptionError) and error.token.source == "cli":
        given = error.token.keyword or error.token.value
        return f"Unknown option: {given}. {_option(given, error, root)}".strip()
    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        return _command(error.unused_tokens[0], root)
    return str(error)


def table(heading: str) -> list[str]:
    """Return a table of docs/coming-from-a-server.md in Markdown; a list follows it of what Octavo lacks."""
    rows = TABLES[heading]
    equal = [row for row in rows if row.ours == row.names and not row.note]
    counterparts = [row for row in rows if row.ours and row not in equal]
    reasons = dict.fromkeys(row.note for row in rows if not row.ours)
    lines = [f"| {heading} | Octavo | |", "|---|---|---|"]
    lines += [line for row in counterparts for line in _lines(row, heading == "command")]
    if equal:
        lines += ["", *_wrapped("Unchanged:", equal)]
    lines += ["", "Without a counterpart:", ""]
    for reason in reasons:
        lines += _wrapped(f"- **{reason}**:", [row for row in rows if not row.ours and row.note == reason])
    return lines


def _lines(row: Row, is_command: bool) -> list[str]:
    """Return a row of a table, cut into several where it has many names; the first one has the note."""
    named = "the same" if row.ours == row.names else f"`{row.ours}`" if is_command else _quoted(row.ours)
    names = wrap(_quoted(row.names), max(30, 110 - len(named + row.note)), break_on_hyphens=False)
    notes = [f" {row.note}".rstrip(), *("" for _ in names[1:])]
    return [f"| {part.rstrip(',')} | {named} |{note} |" for part, note in zip(names, notes, strict=True)]


def _quoted(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


def _wrapped(begin: str, rows: Iterable[Row]) -> list[str]:
    text = f"{begin} {_quoted(' '.join(row.names for row in rows))}"
    return wrap(text, 120, subsequent_indent="  " if begin.startswith("-") else "", break_on_hyphens=False)


def _option(given: str, error: UnknownOptionError, root: App) -> str:
    name = _plain(given)
    here = {option for argument in error.argument_collection for option in argument.names}
    answers = list(dict.fromkeys(answers_to(name, here, root)))
    if answers:
        return " ".join(answers)
    elsewhere = [command for command, options in _commands(root) if name in options]
    if elsewhere:
        return f"It is an option of octavo {', octavo '.join(elsewhere)}."
    # One letter is near to all others.
    return _asked(suggest(name, here)) if name.startswith("--") else ""


def _plain(given: str) -> str:
    """Return an option's name: without "=value" and ".part", and with hyphens."""
    name = given.partition("=")[0]
    if name.startswith("--"):
        return "--" + name[2:].partition(".")[0].replace("_", "-").lower()
    # vLLM's -O3 and -cc.mode.
    return name.partition(".")[0].rstrip("0123456789")


def answers_to(name: str, here: Iterable[str], root: App) -> Iterator[str]:
    """Yield what each server's table says of a name, if the answer is one for this command."""
    for server, rows in OPTIONS.items():
        for row in rows:
            names = row.names.split()
            if row.ours and name in names and name not in row.ours.split():
                ours = " and ".join(row.ours.split()) + _place(row.ours, here, root)
                use = f"Use {ours} for {server}'s {name}"
                yield f"{use}: {row.note}." if row.note else f"{use}."
            elif not row.ours and (name in names or name.replace("--no-", "--", 1) in names):
                yield f"It is {server}'s: {row.note}."


def _place(ours: str, here: Iterable[str], root: App) -> str:
    """Say which commands have an option, unless this one does."""
    first = ours.split()[0]
    if first in here:
        return ""
    return f" (of octavo {', '.join(command for command, options in _commands(root) if first in options)})"


def _command(given: str, root: App) -> str:
    names = [name for name in root if not name.startswith("-")]
    if given.startswith("-"):
        return f"Unknown option: {given}. Options follow a command, such as octavo serve; see octavo --help"
    for row in COMMANDS:
        if given in row.names.split():
            told = "; ".join(text for text in (row.ours and f"use {row.ours}", row.note) if text)
            return f'Unknown command "{given}": {told}'
    near = _asked(suggest(given, names))
    return f'Unknown command "{given}". {near}Available commands: {", ".join(names)}.'


def _asked(suggestion: str) -> str:
    return f"D{suggestion.removeprefix('; d')} ".replace("'", "") if suggestion else ""


def _commands(root: App, path: str = "") -> Iterator[tuple[str, set[str]]]:
    """Yield each command's words and the names of its options."""
    for name in root:
        if not name.startswith("-"):
            words = f"{path} {name}".strip()
            arguments = root[name].assemble_argument_collection()
            yield words, {option for argument in arguments for option in argument.names}
            yield from _commands(root[name], words)
