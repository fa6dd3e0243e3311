"""CPU workloads as token ids: deterministic, no tokenizer, the same on every machine and for every engine.

single: one request; batch16 and batch64: ragged prompts and outputs; shared32: 32 requests that have
their first 512 tokens in common. Greedy, end-of-sequence ignored. Ids avoid the special tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

LOWEST_ID, END_ID = 1000, 49000


@dataclass(frozen=True, slots=True)
class Job:
    """One request.

    Attributes:
        prompt: token ids.
        max_new: tokens to generate.
    """

    prompt: list[int]
    max_new: int


def _ids(rng: Random, num: int) -> list[int]:
    return [rng.randrange(LOWEST_ID, END_ID) for _ in range(num)]


def single() -> list[Job]:
    """128 tokens in, 128 out."""
    return [Job(_ids(Random(0), 128), 128)]


def batch(num: int) -> list[Job]:
    """32-256 tokens in, 64-128 out."""
    rng = Random(1000 + num)
    return [Job(_ids(rng, rng.randint(32, 256)), rng.randint(64, 128)) for _ in range(num)]


def shared() -> list[Job]:
    """A common prefix of 512 tokens and 32 of each request's own in, 64 out."""
    rng = Random(2)
    prefix = _ids(rng, 512)
    return [Job(prefix + _ids(rng, 32), 64) for _ in range(32)]


WORKLOADS: dict[str, Callable[[], list[Job]]] = {
    "single": single,
    "batch16": lambda: batch(16),
    "batch64": lambda: batch(64),
    "shared32": shared,
}
