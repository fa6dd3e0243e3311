"""The `octavo` command: flags, OCTAVO_... variables and octavo.toml derive from the config dataclasses."""

from octavo.cli.app import main

__all__ = ["main"]
