"""`--help` of every command: options in groups that can be read, at the width of a terminal."""

from collections import Counter
from collections.abc import Iterator

import pytest
from cyclopts import App, Argument

from octavo.cli import main
from octavo.cli.command_line import app
from octavo.cli.groups import GROUPS


def commands(root: App = app, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    for name in root:
        if not name.startswith("-"):
            yield (*path, name), root[name]
            yield from commands(root[name], (*path, name))


COMMANDS = dict(commands())


def options(command: tuple[str, ...]) -> list[Argument]:
    """What the help of a command shows, without its positional arguments."""
    arguments = COMMANDS[command].assemble_argument_collection()
    shown = [argument for argument in arguments if argument.show and argument.parameter.name]
    return [argument for argument in shown if argument.name.startswith("-")]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_option_is_in_a_group_that_can_be_read(command: tuple[str, ...]) -> None:
    found: Counter[str] = Counter()
    for option in options(command):
        assert isinstance(option.parameter.group, tuple)
        (group,) = option.parameter.group
        assert group in GROUPS.values(), f"octavo/cli/groups.py has no group for {option.name}"
        found[group.name] += 1
    assert all(number <= 15 for number in found.values()), found
    names = [option.name for option in options(command)]
    assert len(names) == len(set(names))


def test_large_commands_have_several_groups() -> None:
    sizes = {command: len({option.parameter.group for option in options(command)}) for command in COMMANDS}
    assert sizes["serve",] >= 10
    assert all(size >= 4 for command, size in sizes.items() if len(options(command)) > 20)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_a_terminal(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main([*command, "--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    titles = {line.split("─ ")[1].split(" ─")[0] for line in shown.splitlines() if line.startswith("╭─ ")}
    assert titles <= {*GROUPS, "Arguments", "Commands"}
    assert not titles & {"Parameters"}
