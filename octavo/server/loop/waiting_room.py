"""Bounds how much waits, and estimates for how long."""

import time
from collections import deque

from octavo.errors import QueueFullError

# How fast requests begin is estimated from the last ones: at most this many, of the last so many seconds.
_NUM_BEGINNINGS = 256
_MEMORY_S = 60.0
# Bounds of Retry-After, and its value before any request has begun, in seconds.
_LEAST_S, _MOST_S, _UNKNOWN_S = 1.0, 60.0, 5.0


class WaitingRoom:
    """Counts completions and prompt tokens that wait. Its owner must hold a lock.

    An empty room takes anything, so that every request can run at some time.

    Attributes:
        num_waiting: completions, each of a request's n.
        num_tokens: prompt tokens.
        num_rejected: requests that were refused.
    """

    def __init__(self, max_waiting: int, max_tokens: int) -> None:
        self._max_waiting = max_waiting
        self._max_tokens = max_tokens
        self.num_waiting = self.num_tokens = self.num_rejected = 0
        self._beginnings: deque[tuple[float, int]] = deque(maxlen=_NUM_BEGINNINGS)

    def enter(self, num_completions: int) -> None:
        """Let a request in before its prompt is read.

        Raises:
            QueueFullError: too many wait.
        """
        self.check(num_completions)
        self.num_waiting += num_completions

    def check(self, num_completions: int) -> None:
        """Check that `enter` would let a request in.

        Raises:
            QueueFullError: too many wait.
        """
        if self.num_waiting and self.num_waiting + num_completions > self._max_waiting:
            raise self._full(f"{self.num_waiting} completions wait, at most {self._max_waiting} may")

    def add_tokens(self, num_tokens: int) -> None:
        """Note the length of the prompt of a request that was let in.

        Raises:
            QueueFullError: too many tokens wait; the request has to leave.
        """
        if self.num_tokens and self.num_tokens + num_tokens > self._max_tokens:
            raise self._full(f"{self.num_tokens} prompt tokens wait, at most {self._max_tokens} may")
        self.num_tokens += num_tokens

    def leave(self, num_completions: int, num_tokens: int, *, begins: bool) -> None:
        """Let a request out, because it `begins`, or because it ended before it began."""
        self.num_waiting -= num_completions
        self.num_tokens -= num_tokens
        if begins:
            self._beginnings.append((time.monotonic(), num_completions))

    def retry_after_s(self) -> float:
        """Return the seconds until all that wait have begun, if they begin as fast as others did lately."""
        now = time.monotonic()
        recent = [(then, count) for then, count in self._beginnings if now - then < _MEMORY_S]
        if not recent:
            return _UNKNOWN_S
        per_s = sum(count for _, count in recent) / max(now - recent[0][0], _LEAST_S)
        return min(max(self.num_waiting / per_s, _LEAST_S), _MOST_S)

    def _full(self, what: str) -> QueueFullError:
        self.num_rejected += 1
        seconds = self.retry_after_s()
        return QueueFullError(f"the queue is full: {what}; come back in {seconds:.0f} s", seconds)
