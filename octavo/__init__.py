"""Octavo: a small, complete and fast LLM inference engine built on paged attention.

    from octavo import LLM, SamplingParams

Importing this package loads no torch; the first use of LLM does.
"""

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


def __getattr__(name: str) -> object:
    if name == "LLM":
        from octavo.llm import LLM

        return LLM
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
