"""The choice of a replica: tokens of prefill that it saves, less what it has to do already.

    score = saved tokens - beta x load in tokens

among replicas that are not far busier than the least busy one. A far busier replica gets no requests, not
even those whose prefix it holds. The prefix then gets a second home.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from octavo.router.marks import Marks


@dataclass(frozen=True, slots=True)
class Weights:
    """What counts how much.

    Attributes:
        beta: tokens of prefill that one token of load is worth.
        spill: a replica with more than this many times the least load gets nothing,
        slack_tokens: if its load is also above this many tokens.
        request_tokens: load of one request under way, beside its prefill.
    """

    beta: float = 0.25
    spill: float = 2.0
    slack_tokens: float = 4096.0
    request_tokens: float = 64.0


class Candidate(Protocol):
    """What the choice asks of a replica."""

    @property
    def load_tokens(self) -> float:
        """Its load: work that it has to do, in tokens."""
        ...

    @property
    def free_tokens(self) -> float:
        """Room in its cache that nobody reads."""
        ...

    @property
    def last_chosen(self) -> int:
        """Number of the last choice that took it; lower is longer ago."""
        ...

    def saved_tokens(self, marks: Marks) -> int:
        """Return how many tokens of a prompt are in its cache."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica for one request.

    Attributes:
        index: of the replica among the candidates.
        saved_tokens: prompt tokens that its cache holds.
        prefill_tokens: those that it has to compute.
    """

    index: int
    saved_tokens: int
    prefill_tokens: int


def choose(
    marks: Marks, num_tokens: int, candidates: Iterable[Candidate], weights: Weights = Weights()
) -> Choice | None:
    """Return the best of some replicas, or None if there is none. Takes O(replicas x log marks).

    Args:
        marks: of the prompt.
        num_tokens: of the prompt, about.
        candidates: replicas that take requests.
        weights: what counts how much.
    """
    replicas = list(candidates)
    if not replicas:
        return None
    loads = [replica.load_tokens for replica in replicas]
    limit = max(weights.spill * min(loads), weights.slack_tokens)
    best, found = None, None
    for index, (replica, load) in enumerate(zip(replicas, loads, strict=True)):
        if load > limit:
            continue
        saved = min(replica.saved_tokens(marks), num_tokens)
        # Tokens that do not fit must wait for other requests to end.
        load += max(0.0, num_tokens - saved - replica.free_tokens)
        rank = (saved - weights.beta * load, -load, -replica.last_chosen)
        if best is None or rank > best:
            best, found = rank, Choice(index, saved, num_tokens - saved)
    return found
