"""Interrupts at random moments."""

import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Alarm:
    """Raises KeyboardInterrupt once, wherever the main thread is by then."""

    def __init__(self) -> None:
        self.armed = False

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def interrupts(self, act: Callable[[], object], after_s: float) -> bool:
        """Act; True if the alarm came before the end."""
        try:
            self.armed = True
            signal.setitimer(signal.ITIMER_REAL, after_s)
            act()
            self.armed = False
        except KeyboardInterrupt:
            return True
        return False


@contextmanager
def alarm() -> Iterator[Alarm]:
    """Handle alarms; no callback of the garbage collector (hypothesis has one) may swallow the error."""
    it, callbacks = Alarm(), gc.callbacks[:]
    before = signal.signal(signal.SIGALRM, it.handle)
    gc.callbacks.clear()
    try:
        yield it
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.callbacks[:] = callbacks
