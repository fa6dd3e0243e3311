"""Notices work that takes too long: a hung kernel, a deadlock, a device that is gone."""

import faulthandler
import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_STDERR = 2
# The watchdog looks this many times within a deadline, but at least this many seconds apart.
_LOOKS = 20
_SHORTEST_S = 0.01


class Watchdog:
    """Watches one worker from a thread of its own.

        worker     begin ....... end      begin ......................... end
        watchdog     |   look   look        |   look   look   look! -> on_overrun

    Only time in which the watchdog itself runs counts. So a process that was stopped, by SIGSTOP or a
    debugger, has the rest of its deadline when it goes on.
    """

    def __init__(self, deadline_s: float, on_overrun: Callable[[float], None]) -> None:
        """Prepare; `start` begins to look.

        Args:
            deadline_s: seconds a piece of work may take.
            on_overrun: called once for a piece that takes longer, with the seconds it has taken, after all
                threads' stacks were written to the standard error. Called in the watchdog's thread.
        """
        self._deadline_s = deadline_s
        self._on_overrun = on_overrun
        self._piece: object | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="octavo-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more. Idempotent."""
        self._stopped.set()

    def begin(self) -> None:
        """Note that a piece of work begins."""
        self._piece = object()

    def end(self) -> None:
        """Note that it has ended."""
        self._piece = None

    def _run(self) -> None:
        period_s = max(self._deadline_s / _LOOKS, _SHORTEST_S)
        piece, taken_s, looked_at = None, 0.0, time.monotonic()
        while not self._stopped.wait(period_s):
            now = time.monotonic()
            passed_s, looked_at = min(now - looked_at, 2 * period_s), now
            if self._piece is not piece:
                piece, taken_s = self._piece, 0.0
            elif piece is not None:
                before_s, taken_s = taken_s, taken_s + passed_s
                if before_s <= self._deadline_s < taken_s:
                    self._overrun(taken_s)

    def _overrun(self, seconds: float) -> None:
        logger.critical("the engine's step has run for %.1f s; all threads' stacks follow", seconds)
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        self._on_overrun(seconds)
