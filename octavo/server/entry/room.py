"""What bodies hold, shared among those who send them."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from octavo.server.errors import too_many_bodies
from octavo.server.limits import Stop

# A body without an end counts as so many bytes at least: connections are bounded as well.
_MAX_BODIES = 2048
# A body is heard of whenever this part of the room has come, so that a byte now and then does not count.
_PART = 4096
# As many of these as there are connections do no harm.
_SMALL_BYTES = 64 << 10


class Place:
    """What one body holds.

    Attributes:
        sender: who sends it.
        lost: set when it has to give way.
        num_bytes: what counts for it.
        heard_s: when enough of it came last.
    """

    __slots__ = ("_at_part", "heard_s", "lost", "num_bytes", "sender")

    def __init__(self, sender: bytes) -> None:
        self.sender = sender
        self.lost = Stop()
        self.num_bytes = self._at_part = 0
        self.heard_s = time.monotonic()

    def grow(self, num_bytes: int, part: int) -> None:
        """Count so many bytes more."""
        self.num_bytes += num_bytes
        if self.num_bytes >= self._at_part:
            self._at_part, self.heard_s = self.num_bytes + part, time.monotonic()


class Room:
    """Bounds what unfinished bodies hold together. For one event loop.

    When there is no room for more, who holds most gives way: of that sender's bodies the one with the most
    bytes times seconds of silence. So one sender may use all of it, several have equal shares, and a body
    that comes is not refused for those that do not.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._least = max(1, max_bytes // _MAX_BODIES)
        self._part = max(1, max_bytes // _PART)
        self._num_bytes = 0
        self._places: dict[Place, None] = {}

    def enter(self, place: Place) -> None:
        """Let a body in.

        Raises:
            ApiError: 429, it gives way itself.
        """
        self._places[place] = None
        self.take(place, self._least)

    def take(self, place: Place, num_bytes: int) -> None:
        """Count bytes that have come; end other bodies where there is no room for them.

        Raises:
            ApiError: 429, it gives way itself.
        """
        place.grow(num_bytes, self._part)
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            loser = self._loser()
            self.leave(loser)
            if loser is place:
                raise too_many_bodies()
            loser.lost.set()

    def leave(self, place: Place) -> None:
        """Give back what a body holds. Idempotent."""
        if place in self._places:
            del self._places[place]
            self._num_bytes -= place.num_bytes

    def _loser(self) -> Place:
        held: Counter[bytes] = Counter()
        for place in self._places:
            held[place.sender] += place.num_bytes
        most, now = max(held.values()), time.monotonic()
        return max(
            (place for place in self._places if held[place.sender] == most),
            key=lambda place: place.num_bytes * (now - place.heard_s),
        )


class Shelf:
    """Bounds what whole bodies hold while others work on their answers. For one event loop.

    A sender may hold as much as is left for others, so that there is always some left.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[bytes] = Counter()

    @contextmanager
    def hold(self, sender: bytes, num_bytes: int) -> Iterator[None]:
        """Hold a body meanwhile; small ones do not count.

        Raises:
            ApiError: 429, the sender holds too much.
        """
        counted = num_bytes if num_bytes > _SMALL_BYTES else 0
        if counted and self._held[sender] + counted > self._max_bytes - self._held.total():
            raise too_many_bodies()
        self._held[sender] += counted
        try:
            yield
        finally:
            self._held[sender] -= counted
            if not self._held[sender]:
                del self._held[sender]
