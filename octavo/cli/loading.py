"""Loads a model with a progress bar, for every command."""

import dataclasses
import sys
from typing import TYPE_CHECKING

from octavo.cli.interrupts import raise_on_interrupt
from octavo.config import EngineConfig
from octavo.garbage import all_lives_on

if TYPE_CHECKING:
    from octavo.llm import LLM


def load(config: EngineConfig, *, quiet: bool = False) -> "LLM":
    """Load the model; show a progress bar if standard error is a terminal.

    PyTorch is imported here, which takes seconds: after a command has refused what it can.
    From here on Ctrl-C raises KeyboardInterrupt; before, it ends the process at once.
    """
    with all_lives_on():
        from octavo.llm import LLM

    llm = LLM(progress=not quiet and sys.stderr.isatty(), **dataclasses.asdict(config))
    raise_on_interrupt()
    return llm
