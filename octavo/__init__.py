"""Octavo: a small, complete and fast LLM inference engine built on paged attention.

    from octavo import LLM, SamplingParams

Importing this package loads no torch; the first use of LLM does.
"""

import os
import sys
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.errors import OctavoError
from octavo.outputs import (
    CompletionDelta,
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    ScoreOutput,
)
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionDelta",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "OctavoError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "__version__",
]


if "torch" not in sys.modules:
    # Threads of a parallel region spin while they wait for each other. GNU OpenMP's default of milliseconds
    # makes a busy neighbour process slow every step 10 to 50 times; microseconds cost nothing measurable.
    # Read once, when torch loads the runtime; a value of the user's own stays (docs/adr/0007).
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def __getattr__(name: str) -> object:
    if name == "LLM":
        from octavo.llm import LLM

        return LLM
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
