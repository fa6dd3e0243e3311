"""The `octavo` command. Flags, environment (OCTAVO_...) and octavo.toml derive from the config dataclasses."""

from octavo.cli.app import main

__all__ = ["main"]
