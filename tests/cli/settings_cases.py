"""Options read by a command, and values spelled as flags, as a variable and as TOML."""

import json
from collections.abc import Mapping
from dataclasses import fields

from octavo.cli.command_line import app


def parse(*arguments: str) -> dict[str, object]:
    """The fields that a command would run with."""
    _, bound, *_ = app.parse_args(list(arguments), exit_on_error=False, print_error=False)
    bound.apply_defaults()
    found: dict[str, object] = {}
    for name in ("sampling", "engine", "server"):
        if name in bound.arguments:
            options = bound.arguments[name]
            found |= {field.name: getattr(options, field.name) for field in fields(options)}
    return found


def as_flags(name: str, value: object) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, tuple):
        return [word for item in value for word in (flag, str(item))]
    if isinstance(value, Mapping):
        return [word for key, item in value.items() for word in (flag, f"{key}={item}")]
    return [flag, str(value)]


def as_variable(value: object) -> str:
    return json.dumps(value) if isinstance(value, tuple | dict | bool) else str(value)


def as_toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {item}" for key, item in value.items()) + " }"
    return json.dumps(value)
