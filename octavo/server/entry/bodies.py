"""Reads the bodies of requests, with limits on one of them, on all together and on time."""

import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from octavo.server.config import ServerConfig
from octavo.server.entry.room import Place, Room
from octavo.server.errors import ApiError, too_many_bodies
from octavo.server.limits import ClientGoneError, Deadlines, Stop

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

# Unfinished bodies together may take this many times the largest.
_NUM_LARGE_BODIES = 32
# Such a body comes along with its headers.
_SMALL_BYTES = 8 << 10
# Whether bodies come fast enough is judged over such a time.
_WINDOW_S = 10.0


class BodyReader:
    """Reads the bodies of requests, with limits on one of them, on all together and on time."""

    def __init__(self, config: ServerConfig) -> None:
        self._max_bytes = config.max_body_bytes
        self._max_values = config.max_body_values
        self._room = Room(config.max_body_bytes * _NUM_LARGE_BODIES)
        self._timeout_s = config.body_timeout_s
        self._bytes_per_s = config.min_body_bytes_per_s
        # So many equal windows make up the whole time.
        self._num_windows = math.ceil(config.body_timeout_s / _WINDOW_S)
        self._window_s = config.body_timeout_s / self._num_windows
        self._windows = Deadlines(self._window_s)

    async def read(
        self,
        scope: MutableMapping[str, Any],
        receive: Receive,
        before_small: Callable[[], None] = lambda: None,
    ) -> bytes:
        """Return a body of JSON.

        Args:
            scope: of the request, which a Door has let in; headers with names in lower case.
            receive: gives the body's pieces.
            before_small: may refuse a request before a small body is read, which takes two changes of thread:
                they are slow while the engine works. The client of a longer one may still be sending it, and
                would not see an answer.

        Raises:
            ApiError: 415 no JSON, or compressed; 413 too large, or too many values; 408 too slow; 429 there
                is no room, and others need it more.
            ClientGoneError: the client left while it sent the body.
        """
        found = dict(scope["headers"])
        _check_kind(found)
        length = self._length(found)
        if length is not None and 0 < length <= _SMALL_BYTES:
            before_small()
        place = Place(scope["octavo.sender"])
        late, pace = Stop(), _Pace(self._bytes_per_s * self._window_s, self._num_windows)
        pace.begin(self._windows, late)
        try:
            work = place.lost.unless_set(self._read(receive, place, pace, length), _GivesWayError)
            body = await late.unless_set(work, TimeoutError)
        except TimeoutError:
            raise self._too_slow() from None
        except _GivesWayError:
            raise too_many_bodies() from None
        finally:
            self._windows.end(pace.number)
            self._room.leave(place)
        # A value takes as much time and memory to read as 100 characters of a text.
        if len(body) > self._max_values and body.count(b",") >= self._max_values:
            message = f"a body may have at most {self._max_values} values, that is as many commas"
            raise ApiError(413, message, code="body_too_large")
        return body

    def _length(self, headers: Mapping[bytes, bytes]) -> int | None:
        length = headers.get(b"content-length")
        if length is None:
            return None
        if not length.isdigit() or len(length) > 18 or int(length) > self._max_bytes:
            raise self._too_large()
        return int(length)

    async def _read(self, receive: Receive, place: Place, pace: "_Pace", length: int | None) -> bytes:
        pieces: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            piece = message.get("body", b"")
            pieces.append(piece)
            pace.num_bytes += len(piece)
            if pace.num_bytes > self._max_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(pieces)
            # What has come whole with its headers never needs room.
            if pace.num_bytes != length:
                if len(pieces) == 1:
                    self._room.enter(place)
                self._room.take(place, len(piece))

    def _too_large(self) -> ApiError:
        return ApiError(413, f"a body may have at most {self._max_bytes} bytes", code="body_too_large")

    def _too_slow(self) -> ApiError:
        message = (
            f"the body came too slowly: expected all of it after {self._timeout_s:g} s, and in each "
            f"{self._window_s:g} s at least {self._bytes_per_s * self._window_s:.0f} bytes"
        )
        return ApiError(408, message, code="request_timeout", headers={"x-should-retry": "false"})


class _GivesWayError(Exception):
    """A body gives way to others."""


class _Pace:
    """Judges whether a body comes fast enough, at the end of each window of its time.

    Attributes:
        num_bytes: what has come.
        number: of the deadline under way.
    """

    def __init__(self, window_bytes: float, num_windows: int) -> None:
        self.num_bytes = self.number = 0
        self._before = -window_bytes
        self._window_bytes = window_bytes
        self._num_left = num_windows

    def begin(self, windows: Deadlines, late: Stop) -> None:
        """Begin a window, or end the body."""
        self._num_left -= 1
        if self._num_left < 0 or self.num_bytes - self._before < self._window_bytes:
            late.set()
        else:
            self._before = self.num_bytes
            self.number = windows.begin(lambda: self.begin(windows, late))


def _check_kind(headers: Mapping[bytes, bytes]) -> None:
    """Refuse what is no plain JSON.

    Raises:
        ApiError: 415.
    """
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(
            415, "expected the header Content-Type: application/json", code="unsupported_media_type"
        )
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise ApiError(
            415,
            "expected a body without Content-Encoding: send it uncompressed",
            code="unsupported_media_type",
        )
