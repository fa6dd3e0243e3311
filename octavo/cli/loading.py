"""Loading a model with a progress bar, for every command."""

import dataclasses
import sys

from octavo.cli.interrupts import raise_on_interrupt
from octavo.config import EngineConfig
from octavo.llm import LLM


def load(config: EngineConfig, *, quiet: bool = False) -> LLM:
    """Load the model; the bar goes to standard error and only to a terminal.

    Until then Ctrl-C ends the process at once; afterwards it is a KeyboardInterrupt.
    """
    llm = LLM(progress=not quiet and sys.stderr.isatty(), **dataclasses.asdict(config))
    raise_on_interrupt()
    return llm
