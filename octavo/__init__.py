"""Octavo: a small, complete and fast LLM inference engine built on paged attention.

    from octavo import LLM, SamplingParams

Importing this package takes a millisecond or two: each name's module is imported when it is first used.
"""

import os
import sys
from importlib import import_module

# Type checkers take it for true. Importing it from `typing` would take longer than all the rest.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.engine.decisions import Question
    from octavo.errors import OctavoError
    from octavo.llm import LLM
    from octavo.outputs import (
        CompletionDelta,
        CompletionOutput,
        DecisionOutput,
        Logprob,
        PooledOutput,
        RankedDocument,
        RequestMetrics,
        RequestOutput,
        ScoreOutput,
    )
    from octavo.sampling_params import SamplingParams, StructuredOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionDelta",
    "CompletionOutput",
    "DecisionOutput",
    "EngineConfig",
    "Logprob",
    "OctavoError",
    "PooledOutput",
    "Question",
    "RankedDocument",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutput",
    "__version__",
]


if "torch" not in sys.modules:
    # How long OpenMP threads spin while they wait for each other. GNU OpenMP's default, milliseconds, lets a
    # busy neighbour process slow every step 10 to 50 times; microseconds cost nothing measurable. torch reads
    # it once, when it loads the runtime; a value the user has set stays (docs/adr/0007).
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


# Modules of the public names that are not in octavo.outputs.
_MODULES = {
    "LLM": "llm",
    "EngineConfig": "config",
    "OctavoError": "errors",
    "Question": "engine.decisions",
    "SamplingParams": "sampling_params",
    "StructuredOutput": "sampling_params",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(f"octavo.{_MODULES.get(name, 'outputs')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
