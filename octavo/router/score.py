"""The routing score: prefill tokens that a cache hit saves, minus a penalty for load.

    score = saved tokens - beta x load in tokens

A replica that is far busier than the least busy one gets no requests, not even those whose prefix it holds.
Another replica then computes and caches that prefix too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from octavo.router.marks import Marks


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the routing score.

    Attributes:
        beta: saved prefill tokens that offset one token of load.
        spill: a replica is too busy if its load exceeds this multiple of the least load
        slack_tokens: and also this many tokens.
        request_tokens: load of a request in flight, on top of its prefill.
    """

    beta: float = 0.25
    spill: float = 2.0
    slack_tokens: float = 4096.0
    request_tokens: float = 64.0


class Candidate(Protocol):
    """A replica, as the score sees it."""

    @property
    def load_tokens(self) -> float:
        """Pending work, in tokens."""
        ...

    @property
    def free_tokens(self) -> float:
        """Tokens that fit into blocks that no running request uses."""
        ...

    @property
    def last_chosen(self) -> int:
        """Number of the last choice that picked it; lower means longer ago."""
        ...

    def saved_tokens(self, marks: Marks) -> int:
        """Return how many tokens of a prompt its cache holds."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """The replica chosen for one request.

    Attributes:
        index: the replica's index among the candidates.
        saved_tokens: prompt tokens in its cache.
        prefill_tokens: prompt tokens that it must compute.
    """

    index: int
    saved_tokens: int
    prefill_tokens: int


def choose(
    marks: Marks, num_tokens: int, candidates: Iterable[Candidate], weights: Weights = Weights()
) -> Choice | None:
    """Return the best candidate, or None if there are none. Takes O(replicas x log marks).

    Args:
        marks: the prompt's marks.
        num_tokens: estimated length of the prompt.
        candidates: replicas that accept requests.
        weights: the weights of the score.
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
        # Tokens that do not fit wait until other requests end.
        load += max(0.0, num_tokens - saved - replica.free_tokens)
        rank = (saved - weights.beta * load, -load, -replica.last_chosen)
        if best is None or rank > best:
            best, found = rank, Choice(index, saved, num_tokens - saved)
    return found
