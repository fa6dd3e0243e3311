"""Reads the bodies of requests, with limits on one of them, on all together and on time.

All together have a budget of memory, which the senders of requests share.
"""

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from octavo.server.api_errors import ApiError, too_many_bodies
from octavo.server.config import ServerConfig
from octavo.server.limits import ClientGoneError, Deadlines, Stop

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_JSON = b"application/json"
# An unfinished body counts as at least the room divided by this, so connections are bounded as well.
_MAX_BODIES = 2048
# A body counts as active when the room divided by this has come: a byte now and then does not suffice.
_PART = 4096
# Bodies of this size do no harm, even one for each connection.
_UNCOUNTED_BYTES = 64 << 10
# Unfinished bodies together may take this many times the largest.
_NUM_LARGE_BODIES = 32
# A body of this size comes along with its headers.
_SMALL_BYTES = 8 << 10
# Window over which the speed of a body is judged, in seconds.
_WINDOW_S = 10.0


class Upload:
    """The memory that one body takes.

    Attributes:
        sender: who sends it.
        lost: set when it has to give way.
        num_bytes: what counts for it.
        heard_s: when a sizeable part of it last came.
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


class UploadBudget:
    """Bounds the memory that unfinished bodies take together. For one event loop.

    When the room is full, the sender that uses most of it loses a body: the one with the most bytes times
    seconds of silence. So one sender may use all of the room, several get equal shares, and a body that is
    being sent is not refused because others have stalled.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._least = max(1, max_bytes // _MAX_BODIES)
        self._part = max(1, max_bytes // _PART)
        self._num_bytes = 0
        self._uploads: dict[Upload, None] = {}

    def enter(self, upload: Upload) -> None:
        """Let a body in.

        Raises:
            ApiError: 429, if this body gives way itself.
        """
        self._uploads[upload] = None
        self.take(upload, self._least)

    def take(self, upload: Upload, num_bytes: int) -> None:
        """Count bytes that have come; end other bodies where there is no room for them.

        Raises:
            ApiError: 429, if this body gives way itself.
        """
        upload.grow(num_bytes, self._part)
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            loser = self._loser()
            self.leave(loser)
            if loser is upload:
                raise too_many_bodies()
            loser.lost.set()

    def leave(self, upload: Upload) -> None:
        """Release a body's room. Idempotent."""
        if upload in self._uploads:
            del self._uploads[upload]
            self._num_bytes -= upload.num_bytes

    def _loser(self) -> Upload:
        bytes_of: Counter[bytes] = Counter()
        for upload in self._uploads:
            bytes_of[upload.sender] += upload.num_bytes
        most, now = max(bytes_of.values()), time.monotonic()
        return max(
            (upload for upload in self._uploads if bytes_of[upload.sender] == most),
            key=lambda upload: upload.num_bytes * (now - upload.heard_s),
        )


class BodyBudget:
    """Bounds the memory of whole bodies while their answers are made. For one event loop.

    A sender may use as much as is left for others, so that there is always some left.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes_of: Counter[bytes] = Counter()

    @contextmanager
    def reserve(self, sender: bytes, num_bytes: int) -> Iterator[None]:
        """Reserve room for a body while the context lasts; small bodies do not count.

        Raises:
            ApiError: 429, the sender uses too much.
        """
        counted = num_bytes if num_bytes > _UNCOUNTED_BYTES else 0
        if counted and self._bytes_of[sender] + counted > self._max_bytes - self._bytes_of.total():
            raise too_many_bodies()
        self._bytes_of[sender] += counted
        try:
            yield
        finally:
            self._bytes_of[sender] -= counted
            if not self._bytes_of[sender]:
                del self._bytes_of[sender]


class BodyReader:
    """Reads the bodies of requests, with limits on one of them, on all together and on time.

    Attributes:
        room_bytes: what all unfinished bodies may take together.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.room_bytes = config.max_body_bytes * _NUM_LARGE_BODIES
        self._max_bytes = config.max_body_bytes
        self._max_values = config.max_body_values
        self._budget = UploadBudget(self.room_bytes)
        self._timeout_s = config.body_timeout_s
        self._bytes_per_s = config.min_body_bytes_per_s
        # The whole time is cut into equal windows.
        self._num_windows = math.ceil(config.body_timeout_s / _WINDOW_S)
        self._window_s = config.body_timeout_s / self._num_windows
        self._windows = Deadlines(self._window_s)

    async def read(
        self,
        scope: MutableMapping[str, Any],
        receive: Receive,
        before_small: Callable[[], None] = lambda: None,
        kind: bytes = _JSON,
    ) -> bytes:
        """Return a body: JSON, unless another kind is expected.

        Args:
            scope: the scope of a request that a Door has let in; headers with names in lower case.
            receive: gives the body's pieces.
            before_small: may refuse a request before a small body is read, which takes two changes of thread:
                they are slow while the engine works. The client of a longer one may still be sending it, and
                would not see an answer.
            kind: what the body must be.

        Raises:
            ApiError: 415 no JSON, or compressed; 413 too large, or too many values; 408 too slow; 429 there
                is no room, and others need it more.
            ClientGoneError: the client left while it sent the body.
        """
        found = dict(scope["headers"])
        _check_kind(found, kind)
        length = self._length(found)
        if length is not None and 0 < length <= _SMALL_BYTES:
            before_small()
        upload = Upload(scope["octavo.sender"])
        late, pace = Stop(), _Pace(self._bytes_per_s * self._window_s, self._num_windows)
        pace.begin(self._windows, late)
        try:
            work = upload.lost.unless_set(self._read(receive, upload, pace, length), _GivesWayError)
            body = await late.unless_set(work, TimeoutError)
        except TimeoutError:
            raise self._too_slow() from None
        except _GivesWayError:
            raise too_many_bodies() from None
        finally:
            self._windows.end(pace.number)
            self._budget.leave(upload)
        # A value takes as much time and memory to read as 100 characters of a text.
        if kind == _JSON and len(body) > self._max_values and body.count(b",") >= self._max_values:
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

    async def _read(self, receive: Receive, upload: Upload, pace: "_Pace", length: int | None) -> bytes:
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
            # A body that came whole with its headers needs no room.
            if pace.num_bytes != length:
                if len(pieces) == 1:
                    self._budget.enter(upload)
                self._budget.take(upload, len(piece))

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
        number: the number of the current deadline.
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


def _check_kind(headers: Mapping[bytes, bytes], expected: bytes) -> None:
    """Refuse a body that is not plainly of a kind.

    Raises:
        ApiError: 415.
    """
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != expected:
        text = f"expected the header Content-Type: {expected.decode()}"
        raise ApiError(415, text, code="unsupported_media_type")
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise ApiError(
            415,
            "expected a body without Content-Encoding: send it uncompressed",
            code="unsupported_media_type",
        )
