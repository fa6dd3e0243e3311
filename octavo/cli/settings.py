"""Options beside flags: OCTAVO_... variables, then octavo.toml. What no command takes is refused.

block_size = 32         # of every command that has such an option
[generate]              # of `octavo generate`, and before the ones above
temperature = 0.7
logit_bias = { 5 = -100 }
[bench.prefix]          # of `octavo bench prefix`
head_dim = 64
"""

import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Set
from functools import partial
from pathlib import Path
from typing import get_args

import cyclopts
from cyclopts import App, ArgumentCollection

from octavo.errors import ConfigError, suggest

PREFIX = "OCTAVO_"
FILE_NAME = "octavo.toml"
_MAX_FILE_BYTES = 1 << 20

# ("bench", "prefix"): the command `octavo bench prefix`.
Command = tuple[str, ...]
Table = Mapping[str, object]


def add_sources(root: App) -> None:
    """Let all commands of an app take options from the environment and from the file, in this order."""
    root.config = (
        partial(_check_environment, root),
        cyclopts.config.Env(PREFIX, command=False),
        partial(_read_file, root),
        _check_integers,
    )


class CommandOptions(Mapping[Command, Set[str]]):
    """Names of the options of each command, as field names. They are looked up one command at a time."""

    def __init__(self, root: App) -> None:
        self._apps = dict(_commands(root))
        self._names: dict[Command, Set[str]] = {}

    def __getitem__(self, command: Command) -> Set[str]:
        if command not in self._names:
            self._names[command] = frozenset(_option_names(self._apps[command]))
        return self._names[command]

    def __iter__(self) -> Iterator[Command]:
        return iter(self._apps)

    def __len__(self) -> int:
        return len(self._apps)


def _check_environment(root: App, app: App, command: Command, arguments: ArgumentCollection) -> None:
    """Refuse variables that are an option of no command; those of other commands are not this one's."""
    options = CommandOptions(root)
    for variable in sorted(name for name in os.environ if name.startswith(PREFIX)):
        name = variable.removeprefix(PREFIX)
        if not name.isupper() or not _is_option(name.lower(), command, options):
            known = {PREFIX + name.upper() for names in options.values() for name in names}
            raise ConfigError(f"unknown environment variable {variable!r}{suggest(variable, known)}")


def _read_file(root: App, app: App, command: Command, arguments: ArgumentCollection) -> None:
    document = _parse(Path(FILE_NAME))
    if document:
        settings = settings_of(document, CommandOptions(root), command)
        source = cyclopts.config.Dict(settings, source=FILE_NAME, use_commands_as_keys=False)
        source(app, command, arguments)


def settings_of(document: Table, options: Mapping[Command, Set[str]], command: Command) -> dict[str, object]:
    """Return what a file says about one command's options; all of the file is checked.

    Args:
        document: the file. Keys may be spelled with hyphens.
        options: names of the options of each command.
        command: one of them.

    Raises:
        ConfigError: a key is an option of no command, or its table's command does not have it, or it is
            there twice.
    """
    tables = dict(_tables(document, options))
    for path, table in tables.items():
        for key, name in _option_keys(table, path, options):
            if not (name in options[path] if path else _is_option(name, command, options)):
                valid = options[path] if path else frozenset().union(*options.values())
                commands = [other[-1] for other in options if other[:-1] == path]
                raise ConfigError(
                    f"{_where(path)}: unknown option {key!r}{suggest(name, [*valid, *commands])}"
                )
    settings = _read_table(tables[()], (), options) | _read_table(tables.get(command, {}), command, options)
    return {name: value for name, value in settings.items() if name in options[command]}


def _tables(
    table: object, options: Mapping[Command, Set[str]], path: Command = ()
) -> Iterator[tuple[Command, Table]]:
    """The tables of commands, the outermost first."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{_where(path)} must be a table of options, got {table!r}")
    yield path, table
    for key, value in table.items():
        if (*path, key) in options:
            yield from _tables(value, options, (*path, key))


def _read_table(table: Table, path: Command, options: Mapping[Command, Set[str]]) -> dict[str, object]:
    settings: dict[str, object] = {}
    for key, name in _option_keys(table, path, options):
        if name in settings:
            raise ConfigError(f"{_where(path)}: {name} is there twice, with hyphens and with underscores")
        value = table[key]
        # A table such as logit_bias is one value.
        settings[name] = json.dumps(value, default=str) if isinstance(value, Mapping) else value
    return settings


def _option_keys(
    table: Table, path: Command, options: Mapping[Command, Set[str]]
) -> Iterator[tuple[str, str]]:
    """Keys of a table that are no commands' tables, and the names they stand for."""
    return ((key, key.replace("-", "_")) for key in table if (*path, key) not in options)


def _is_option(name: str, likely: Command, options: Mapping[Command, Set[str]]) -> bool:
    """True if any command has this option; the likely one is asked first."""
    return name in options[likely] or any(name in options[command] for command in options)


def _where(path: Command) -> str:
    return f"{FILE_NAME}: [{'.'.join(path)}]" if path else FILE_NAME


def _check_integers(app: App, command: Command, arguments: ArgumentCollection) -> None:
    """Refuse fractions where integers are asked for: cyclopts would round them."""
    for argument in arguments:
        if _leaves(argument.hint) <= {int, type(None), ...}:
            for token in argument.tokens:
                if "." in token.value:
                    raise ConfigError(
                        f"{token.keyword or argument.name} must be an integer, got {token.value}"
                    )


def _leaves(hint: object) -> set[object]:
    """The types that a hint is put together from: {int, None} of `tuple[int, int] | None`."""
    parts = get_args(hint)
    return set().union(*map(_leaves, parts)) if parts else {hint}


def _parse(path: Path) -> Table:
    """Parse the file; empty if there is none."""
    if not os.path.lexists(path):
        return {}
    # Opening a pipe would wait for who writes to it.
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} must be a file, got a {'folder' if path.is_dir() else 'device or pipe'}")
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} must hold at most {_MAX_FILE_BYTES} bytes")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} must be valid TOML: {error}") from error


def _commands(app: App, path: Command = ()) -> Iterator[tuple[Command, App]]:
    for name in app:
        if not name.startswith("-"):
            yield (*path, name), app[name]
            yield from _commands(app[name], (*path, name))


def _option_names(command: App) -> Iterator[str]:
    """Names of flags, as field names: neither arguments without a flag, nor --no-... forms."""
    for argument in command.assemble_argument_collection():
        for name in argument.parameter.name or ():
            if name.startswith("--"):
                yield name.removeprefix("--").replace("-", "_")
