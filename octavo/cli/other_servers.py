"""Messages about options and commands that Octavo does not have."""

from collections.abc import Iterable, Iterator, Mapping
from textwrap import wrap

from cyclopts import App, CycloptsError, UnknownCommandError, UnknownOptionError

from octavo.cli.other_server_tables import COMMANDS, LLAMA_CPP, TABLES, VLLM, Row
from octavo.errors import suggest

OPTIONS: Mapping[str, tuple[Row, ...]] = {"vLLM": VLLM, "llama.cpp": LLAMA_CPP}


def explained(error: CycloptsError, root: App) -> str:
    """Return the message of an error of the command line, with an answer to what another server has."""
    if isinstance(error, UnknownOptionError) and error.token.source == "cli":
        typed = error.token.keyword or error.token.value
        return f"Unknown option: {typed}. {_option(typed, error, root)}".strip()
    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        return _command(error.unused_tokens[0], root)
    return str(error)


def table(heading: str) -> list[str]:
    """Return a list of docs/coming-from-a-server.md, in lines of Markdown: first what has a counterpart."""
    rows = TABLES[heading]
    equal = [row for row in rows if row.ours == row.names and not row.note]
    lines = [line for row in rows if row.ours and row not in equal for line in _counterpart(row, heading)]
    if equal:
        lines += _wrapped(f"- {_all_names(equal)}: unchanged")
    lines += ["", "No counterpart:", ""]
    for reason in dict.fromkeys(row.note for row in rows if not row.ours):
        lacking = [row for row in rows if not row.ours and row.note == reason]
        lines += _wrapped(f"- {_all_names(lacking)}: {reason}")
    return lines


def _counterpart(row: Row, heading: str) -> list[str]:
    ours = f"`{row.ours}`" if heading == "command" else _quoted(row.ours)
    named = "the same" if row.ours == row.names else ours
    return _wrapped(f"- {_quoted(row.names)}: {'; '.join(filter(None, (named, row.note)))}")


def _all_names(rows: Iterable[Row]) -> str:
    return _quoted(" ".join(row.names for row in rows))


def _quoted(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


def _wrapped(text: str) -> list[str]:
    return wrap(text, 120, subsequent_indent="  ", break_on_hyphens=False)


def _option(typed: str, error: UnknownOptionError, root: App) -> str:
    name = _plain(typed)
    here = {option for argument in error.argument_collection for option in argument.names}
    answers = list(dict.fromkeys(answers_to(name, here, root)))
    if answers:
        return " ".join(answers)
    others = [command for command, options in _commands(root) if name in options]
    if others:
        return f"It is an option of octavo {', octavo '.join(others)}."
    # A name of one letter is near to all others.
    return _question(suggest(name, here)) if name.startswith("--") else ""


def _plain(typed: str) -> str:
    """Return an option's name: without "=value" and ".part", and with hyphens."""
    name = typed.partition("=")[0]
    if name.startswith("--"):
        return "--" + name[2:].partition(".")[0].replace("_", "-").lower()
    # vLLM has -O3 and -cc.mode.
    return name.partition(".")[0].rstrip("0123456789")


def answers_to(name: str, here: Iterable[str], root: App) -> Iterator[str]:
    """Yield what each server's table says about a name, if that answers a user of this command."""
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


def _command(typed: str, root: App) -> str:
    names = [name for name in root if not name.startswith("-")]
    if typed.startswith("-"):
        return f"Unknown option: {typed}. Options follow a command, such as octavo serve; see octavo --help"
    for row in COMMANDS:
        if typed in row.names.split():
            advice = "; ".join(text for text in (row.ours and f"use {row.ours}", row.note) if text)
            return f'Unknown command "{typed}": {advice}'
    near = _question(suggest(typed, names))
    return f'Unknown command "{typed}". {near}Available commands: {", ".join(names)}.'


def _question(suggestion: str) -> str:
    return f"D{suggestion.removeprefix('; d')} ".replace("'", "") if suggestion else ""


def _commands(root: App, path: str = "") -> Iterator[tuple[str, set[str]]]:
    """Yield each command's words and the names of its options."""
    for name in root:
        if not name.startswith("-"):
            words = f"{path} {name}".strip()
            arguments = root[name].assemble_argument_collection()
            yield words, {option for argument in arguments for option in argument.names}
            yield from _commands(root[name], words)
