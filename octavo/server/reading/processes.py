"""The server's side: hands long bodies to child processes.

Decoding JSON holds the interpreter's lock, up to 25 ms for a body that is allowed, and checking values one by
one takes it from the engine's thread again and again. So a child decodes and checks a long body, renders and
tokenizes its prompt, and sends back token ids and the few fields that the answer needs.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec

from octavo.child_process import ChildProcess
from octavo.errors import NotReadyError
from octavo.server.api_errors import ApiError
from octavo.server.reading.fair_threads import FairThreads
from octavo.server.reading.forms import Outline, Refusal, Reply, Task, encode

logger = logging.getLogger("octavo.server")

# Shorter bodies take the lock for 1 to 3 ms at worst.
LONG_BYTES = 32 << 10
CPU_SECONDS, MEMORY_BYTES = 30.0, 4 << 30
# These limits allow for a machine that is too busy to give a child its time.
_WALL_S, _START_S = 120.0, 60.0
_NUM_CHILDREN = 2


class ReadingProcesses:
    """Reads long bodies in child processes, each started when it is first needed, or by `start`."""

    def __init__(self, outline: Callable[[], Outline], max_waiting_bytes: int) -> None:
        """Start nothing yet.

        Args:
            outline: returns what a child has to know.
            max_waiting_bytes: of the bodies that wait for a child.
        """
        self._max_waiting_bytes = max_waiting_bytes
        self._outline = outline
        self._encoded_outline: bytes | None = None
        self._threads = FairThreads(_NUM_CHILDREN, "octavo-bodies")
        # The child of each thread; `_children` are all of them, for `close`.
        self._own = threading.local()
        self._lock = threading.Lock()
        self._children: set[ChildProcess] = set()
        self._is_closed = False

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the children."""
        return [child.pid for child in self._children]

    def start(self) -> None:
        """Begin to start a child, before there is a body to read."""
        self._threads.start(self._own_child).add_done_callback(self._note_failure)

    async def read(self, sender: bytes, path: str, body: bytes) -> Reply:
        """Read a sender's body that was sent to a path; senders take turns.

        Raises:
            ApiError: why it is refused; 413 it takes too long, 429 the bodies that wait are too large.
            NotReadyError: no process can be started, or it does not reply.
        """
        self._threads.make_room(sender, len(body), self._max_waiting_bytes)
        reply = await self._threads.run(sender, self._read, path, body, num_bytes=len(body))
        if isinstance(reply, Refusal):
            if reply.frames:
                logger.error("a body could not be read\n%s", reply.frames)
            raise ApiError.of(reply.status, reply.detail, dict(reply.headers))
        return reply

    def close(self) -> None:
        """End the children. Idempotent."""
        with self._lock:
            self._is_closed = True
            children, self._children = self._children, set()
        self._threads.close()
        for child in children:
            child.stop()

    def _read(self, path: str, body: bytes) -> Reply:
        task = encode(Task(path, body))
        was_warm = getattr(self._own, "child", None) is not None
        try:
            return self._ask(task)
        except TimeoutError:
            raise NotReadyError("the process that reads long bodies does not reply; try again") from None
        except OSError:
            # A warm child may have died earlier, or because of what it read before.
            if was_warm and not self._is_closed:
                return self._ask_again(task)
            raise _over_limits() from None

    def _ask_again(self, task: bytes) -> Reply:
        try:
            return self._ask(task)
        except OSError:
            raise _over_limits() from None

    def _ask(self, task: bytes) -> Reply:
        child = self._own_child()
        try:
            return msgspec.msgpack.decode(child.ask(task), type=Reply)
        except BaseException:
            self._own.child = None
            with self._lock:
                self._children.discard(child)
            child.stop()
            raise

    def _note_failure(self, started: "Future[ChildProcess]") -> None:
        if not (self._is_closed or started.cancelled()) and (error := started.exception()) is not None:
            logger.warning("long bodies cannot be read yet: %s", error)

    def _own_child(self) -> ChildProcess:
        """Return this thread's child."""
        child: ChildProcess | None = getattr(self._own, "child", None)
        if child is None:
            child = self._own.child = self._start()
        return child

    def _start(self) -> ChildProcess:
        if self._encoded_outline is None:
            self._encoded_outline = self._outline().encode()
        limits = (str(CPU_SECONDS), str(MEMORY_BYTES))
        command = [sys.executable, "-P", "-m", "octavo.server.reading.child", *limits]
        root = str(Path(__file__).parents[3])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        try:
            child = ChildProcess(command, start_s=_START_S, wall_s=_WALL_S, environment=environment)
            try:
                child.ask(self._encoded_outline)
            except BaseException:
                child.stop()
                raise
        except OSError as error:
            raise NotReadyError(f"the process that reads long bodies does not start: {error}") from error
        with self._lock:
            if not self._is_closed:
                self._children.add(child)
                return child
        child.stop()
        raise NotReadyError("the server ends")


def _over_limits() -> ApiError:
    gib = MEMORY_BYTES >> 30
    text = f"reading the body took more than {CPU_SECONDS:g} s of processor time or {gib} GiB of memory"
    return ApiError(413, text, code="body_too_large")
