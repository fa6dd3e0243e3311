"""The `octavo` command; its flags, OCTAVO_... variables and octavo.toml keys follow from dataclasses."""

from collections.abc import Sequence

from octavo.cli.interrupts import leave_on_interrupt, raise_on_interrupt

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: default: sys.argv[1:].

    Raises:
        SystemExit: with the exit code, unless it is 0; see octavo.cli.command_line.
    """
    # This holds during the slow imports; `load` ends it.
    leave_on_interrupt()
    try:
        from octavo.cli.command_line import run

        run(arguments)
    finally:
        raise_on_interrupt()
