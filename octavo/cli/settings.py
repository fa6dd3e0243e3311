"""Options that do not come as flags: from OCTAVO_... variables, then from octavo.toml.

block_size = 32         # for every command with this option
[generate]              # for `octavo generate`; outranks the keys above
temperature = 0.7
logit_bias = { 5 = -100 }
[bench.prefix]          # for `octavo bench prefix`
head_dim = 64

A name that no command has is refused. What Kubernetes and Docker set in the containers beside a service whose
name begins with "octavo" is left alone.
"""

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Set
from functools import cache, partial
from pathlib import Path
from typing import get_args

import cyclopts
from cyclopts import App, ArgumentCollection

from octavo.errors import ConfigError, suggest

PREFIX = "OCTAVO_"
FILE_NAME = "octavo.toml"
_MAX_FILE_BYTES = 1 << 20
# A service `octavo-front` adds OCTAVO_FRONT_SERVICE_HOST=10.0.0.1, OCTAVO_FRONT_PORT_80_TCP_ADDR=10.0.0.1 and
# more, and OCTAVO_FRONT_PORT=tcp://10.0.0.1:80, which only its value tells from an option.
# Source: "Accessing the Service" in Kubernetes' documentation, "Legacy container links" in Docker's.
_SERVICE_NAME = re.compile(
    r"\w*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR|START|END))*|ENV_\w+)"
)
_SERVICE_URL = re.compile(r"\w*_PORT(_START|_END)?=(tcp|udp|sctp)://\S*|\w*_NAME=/[^/]+/[^/]+")

# ("bench", "prefix"): the command `octavo bench prefix`.
Command = tuple[str, ...]
# Field names of each command's options.
Options = Mapping[Command, Set[str]]
Table = Mapping[str, object]


def add_sources(root: App) -> None:
    """Let every command of an app read options from the environment, then from the file."""

    # Cached, as it takes a tenth of a second, and late: commands are added after this call.
    @cache
    def options() -> Options:
        return dict(_commands(root))

    root.config = (
        partial(_check_environment, options),
        cyclopts.config.Env(PREFIX, command=False),
        _forget_services,
        partial(_read_file, options),
        _check_integers,
    )


def _check_environment(
    options: Callable[[], Options], app: App, command: Command, arguments: ArgumentCollection
) -> None:
    """Refuse variables that no command knows; a variable of another command is fine."""
    variables = sorted(name for name in os.environ if name.startswith(PREFIX))
    if variables:
        known = {PREFIX + name.upper() for names in options().values() for name in names}
        for variable in variables:
            if variable not in known and not _is_service(variable):
                raise ConfigError(f"unknown environment variable {variable!r}{suggest(variable, known)}")


def _is_service(variable: str) -> bool:
    """Tell whether a variable that is no option says where a service is."""
    return bool(
        _SERVICE_NAME.fullmatch(variable) or _SERVICE_URL.fullmatch(f"{variable}={os.environ[variable]}")
    )


def _forget_services(app: App, command: Command, arguments: ArgumentCollection) -> None:
    """Take back a port that is the URL of a service, OCTAVO_PORT=tcp://10.0.0.1:80; the file may set it."""
    (port,) = [argument.tokens for argument in arguments if argument.name == "--port"] or [[]]
    port[:] = [token for token in port if not _SERVICE_URL.fullmatch(f"{token.keyword}={token.value}")]


def _read_file(
    options: Callable[[], Options], app: App, command: Command, arguments: ArgumentCollection
) -> None:
    document = _parse(Path(FILE_NAME))
    if document:
        settings = settings_of(document, options(), command)
        source = cyclopts.config.Dict(settings, source=FILE_NAME, use_commands_as_keys=False)
        source(app, command, arguments)


def settings_of(document: Table, options: Options, command: Command) -> dict[str, object]:
    """Return what a file sets for one command, after checking the whole file.

    Args:
        document: the parsed file. Keys may contain hyphens or underscores.
        options: the options of every command.
        command: the one that runs.

    Raises:
        ConfigError: an unknown key, a key in the table of a command that lacks it, or a key given twice.
    """
    settings: dict[str, object] = {}
    for path, table in _tables(document, options):
        found = _read_table(table, path, options)
        if path in ((), command):
            settings |= found
    return {name: value for name, value in settings.items() if name in options[command]}


def _tables(table: object, options: Options, path: Command = ()) -> Iterator[tuple[Command, Table]]:
    """Yield each command's table, the outermost first."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{_where(path)} must be a table of options, got {table!r}")
    yield path, table
    for key, value in table.items():
        if (*path, key) in options:
            yield from _tables(value, options, (*path, key))


def _read_table(table: Table, path: Command, options: Options) -> dict[str, object]:
    """Return one table's values by field name; tables of subcommands are skipped."""
    valid = options[path] if path else frozenset().union(*options.values())
    commands = {other[-1] for other in options if other[:-1] == path}
    settings: dict[str, object] = {}
    for key, value in table.items():
        if key in commands:
            continue
        name = key.replace("-", "_")
        if name not in valid:
            raise ConfigError(f"{_where(path)}: unknown option {key!r}{suggest(name, valid | commands)}")
        if name in settings:
            raise ConfigError(f"{_where(path)}: {name} is there twice, with hyphens and with underscores")
        # A table such as logit_bias is one value.
        settings[name] = json.dumps(value, default=str) if isinstance(value, Mapping) else value
    return settings


def _where(path: Command) -> str:
    return f"{FILE_NAME}: [{'.'.join(path)}]" if path else FILE_NAME


def _check_integers(app: App, command: Command, arguments: ArgumentCollection) -> None:
    """Refuse fractions for integer options; cyclopts would round them."""
    for argument in arguments:
        if _leaves(argument.hint) <= {int, type(None), ...}:
            for token in argument.tokens:
                if "." in token.value:
                    raise ConfigError(
                        f"{token.keyword or argument.name} must be an integer, got {token.value}"
                    )


def _leaves(hint: object) -> set[object]:
    """Return the types in a hint: {int, None} for `tuple[int, int] | None`."""
    parts = get_args(hint)
    return set().union(*map(_leaves, parts)) if parts else {hint}


def _parse(path: Path) -> Table:
    """Parse the file; a missing one is empty."""
    if not os.path.lexists(path):
        return {}
    # Opening a pipe would block until somebody writes to it.
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


def _commands(app: App, path: Command = ()) -> Iterator[tuple[Command, Set[str]]]:
    """Yield each command below `app` with the field names of its flags, without the --no-... forms."""
    for name in app:
        if not name.startswith("-"):
            arguments = app[name].assemble_argument_collection()
            flags = [flag for argument in arguments for flag in argument.parameter.name or ()]
            yield (*path, name), {flag[2:].replace("-", "_") for flag in flags if flag.startswith("--")}
            yield from _commands(app[name], (*path, name))
