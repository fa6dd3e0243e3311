"""Options that do not come as flags: from OCTAVO_... variables, then from a file.

The file is the one that --config or OCTAVO_CONFIG names, else octavo.toml of the working directory. Whoever
could have written it must be the user or root. What decides who reaches a server, where keys and answers go,
and what code runs is only taken from a file that was named: a working directory may be anybody's download.
What a file sets is said on standard error.

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
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import get_args

import cyclopts
from cyclopts import App, ArgumentCollection

from octavo.errors import ConfigError, suggest
from octavo.own_files import read_own_file

PREFIX = "OCTAVO_"
FILE_NAME = "octavo.toml"
CONFIG_FLAG, CONFIG_VARIABLE = "--config", "OCTAVO_CONFIG"
# Variables that operators and kernels read, whoever calls them.
_OTHER_VARIABLES = {CONFIG_VARIABLE, "OCTAVO_DEBUG", "OCTAVO_GPU_GENERATION"}
_MAX_FILE_BYTES = 1 << 20
# A service `octavo-front` adds OCTAVO_FRONT_SERVICE_HOST=10.0.0.1, OCTAVO_FRONT_PORT_80_TCP_ADDR=10.0.0.1 and
# more, and OCTAVO_FRONT_PORT=tcp://10.0.0.1:80, which only its value tells from an option.
# Source: "Accessing the Service" in Kubernetes' documentation, "Legacy container links" in Docker's.
_SERVICE_NAME = re.compile(
    r"\w*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR|START|END))*|ENV_\w+)"
)
_SERVICE_URL = re.compile(r"\w*_PORT(_START|_END)?=(tcp|udp|sctp)://\S*|\w*_NAME=/[^/]+/[^/]+")
_SENSITIVE = {
    "who reaches the server, and what they see": "host uds insecure allowed_hosts public_metrics api_key "
    "api_key_file ssl_certfile ssl_keyfile",
    "where keys, requests and their times go": "base_url otlp_traces_endpoint",
    "which files are written": "output_file json_file plot batch_dir",
    "which code runs": "kernel_cache_dir",
}
SENSITIVE = frozenset(name for names in _SENSITIVE.values() for name in names.split())
"""Options that the file of a working directory may not set, because of what they decide."""

# ("bench", "prefix"): the command `octavo bench prefix`.
Command = tuple[str, ...]
# Field names of each command's options.
Options = Mapping[Command, Set[str]]
Table = Mapping[str, object]


def add_sources(root: App, named: Path | None = None) -> None:
    """Let every command of an app read options from the environment, then from the file.

    Args:
        root: the app.
        named: what --config names.
    """

    # The result is cached, as it takes a tenth of a second, and made late, as commands are added after this.
    @cache
    def options() -> Options:
        return dict(_commands(root))

    root.config = (
        partial(_check_environment, options),
        cyclopts.config.Env(PREFIX, command=False),
        _forget_services,
        partial(_read_file, options, named),
        _check_integers,
    )


def take_config(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the file that --config FILE or --config=FILE names, anywhere before --, and the other arguments.

    Raises:
        ConfigError: it is there twice, or without a file.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    found: list[str] = []
    rest: list[str] = []
    words = iter(arguments[:end])
    for word in words:
        if word == CONFIG_FLAG:
            found.append(next(words, ""))
        elif word.startswith(f"{CONFIG_FLAG}="):
            found.append(word.partition("=")[2])
        else:
            rest.append(word)
    if found not in ([], found[:1]) or "" in found:
        raise ConfigError(f"{CONFIG_FLAG} must name one file, got {', '.join(map(repr, found))}")
    return Path(found[0]) if found else None, rest + list(arguments[end:])


def _check_environment(
    options: Callable[[], Options], app: App, command: Command, arguments: ArgumentCollection
) -> None:
    """Refuse variables that no command knows; a variable of another command is fine."""
    variables = sorted(name for name in os.environ if name.startswith(PREFIX))
    if variables:
        known = {PREFIX + name.upper() for names in options().values() for name in names} | _OTHER_VARIABLES
        for variable in variables:
            if variable not in known and not _is_service(variable):
                raise ConfigError(f"unknown environment variable {variable!r}{suggest(variable, known)}")


def _is_service(variable: str) -> bool:
    """Return whether a variable that is no option says where a service is."""
    return bool(
        _SERVICE_NAME.fullmatch(variable) or _SERVICE_URL.fullmatch(f"{variable}={os.environ[variable]}")
    )


def _forget_services(app: App, command: Command, arguments: ArgumentCollection) -> None:
    """Take back a port that is the URL of a service, OCTAVO_PORT=tcp://10.0.0.1:80; the file may set it."""
    (port,) = [argument.tokens for argument in arguments if argument.name == "--port"] or [[]]
    port[:] = [token for token in port if not _SERVICE_URL.fullmatch(f"{token.keyword}={token.value}")]


def _read_file(
    options: Callable[[], Options],
    named: Path | None,
    app: App,
    command: Command,
    arguments: ArgumentCollection,
) -> None:
    if named is None and os.environ.get(CONFIG_VARIABLE):
        named = Path(os.environ[CONFIG_VARIABLE])
    path = Path(FILE_NAME) if named is None else named
    if named is None and not os.path.lexists(path):
        return
    document = _parse(path)
    settings = settings_of(document, options(), command, path)
    if named is None:
        _refuse_sensitive(document, options())
    _tell(path, settings)
    source = cyclopts.config.Dict(settings, source=str(path), use_commands_as_keys=False)
    source(app, command, arguments)


def _refuse_sensitive(document: Table, options: Options) -> None:
    for path, table in _tables(document, options):
        for key in table:
            if key.replace("-", "_") in SENSITIVE and (*path, key) not in options:
                variable = PREFIX + key.upper().replace("-", "_")
                raise ConfigError(
                    f"{_where(path, FILE_NAME)} sets {key}, which the file of a working directory may not; "
                    f"give it as {variable} or on the command line, or name the file by {CONFIG_FLAG}"
                )


def _tell(path: Path, settings: Mapping[str, object]) -> None:
    """Say what is set; values may be secret."""
    names = ", ".join(settings) or "nothing for this command"
    with suppress(OSError):
        print(f"octavo: {path.absolute()} sets {names}", file=sys.stderr)


def settings_of(
    document: Table, options: Options, command: Command, file: Path | str = FILE_NAME
) -> dict[str, object]:
    """Return what a file sets for one command, after checking the whole file.

    Args:
        document: the parsed file. Keys may contain hyphens or underscores.
        options: the options of every command.
        command: the one that runs.
        file: its name, for messages.

    Raises:
        ConfigError: an unknown key, a key in the table of a command that lacks it, or a key given twice.
    """
    settings: dict[str, object] = {}
    for path, table in _tables(document, options, file):
        found = _read_table(table, path, options, file)
        if path in ((), command):
            settings |= found
    return {name: value for name, value in settings.items() if name in options[command]}


def _tables(
    table: object, options: Options, file: Path | str = FILE_NAME, path: Command = ()
) -> Iterator[tuple[Command, Table]]:
    """Yield each command's table, the outermost first."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{_where(path, file)} must be a table of options, got {table!r}")
    yield path, table
    for key, value in table.items():
        if (*path, key) in options:
            yield from _tables(value, options, file, (*path, key))


def _read_table(table: Table, path: Command, options: Options, file: Path | str) -> dict[str, object]:
    """Return one table's values by field name; tables of subcommands are skipped."""
    valid = options[path] if path else frozenset().union(*options.values())
    commands = {other[-1] for other in options if other[:-1] == path}
    settings: dict[str, object] = {}
    for key, value in table.items():
        if key in commands:
            continue
        name = key.replace("-", "_")
        if name not in valid:
            raise ConfigError(
                f"{_where(path, file)}: unknown option {key!r}{suggest(name, valid | commands)}"
            )
        if name in settings:
            raise ConfigError(
                f"{_where(path, file)}: {name} is there twice, with hyphens and with underscores"
            )
        # A table such as logit_bias is one value.
        settings[name] = json.dumps(value, default=str) if isinstance(value, Mapping) else value
    return settings


def _where(path: Command, file: Path | str) -> str:
    return f"{file}: [{'.'.join(path)}]" if path else str(file)


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
    try:
        return tomllib.loads(read_own_file(path, str(path), _MAX_FILE_BYTES))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} must be valid TOML: {error}") from error


def _commands(app: App, path: Command = ()) -> Iterator[tuple[Command, Set[str]]]:
    """Yield each command below `app` with the field names of its flags, without the --no-... forms."""
    for name in app:
        if not name.startswith("-"):
            flags = [argument.name for argument in app[name].assemble_argument_collection()]
            yield (*path, name), {_field_name(flag) for flag in flags if flag.startswith("--")}
            yield from _commands(app[name], (*path, name))


def _field_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
