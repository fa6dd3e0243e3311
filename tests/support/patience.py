"""A test times out when it and its children stand still, not when others use the machine."""

import os
import signal
import threading
from typing import Any

import pytest_timeout

from octavo.patience import Patience

# A test may use two cores, and threads that spin. One that never quite stands still ends, too.
_BUSY, _MOST = 4, 12


def set_timer(item: Any, settings: Any) -> None:
    """Set the timer of pytest-timeout: it asks every `timeout` seconds whether the test works.

    The test ends if it has not, if it used four times as many seconds of processor time, or after twelve
    times as many by the clock. What ends it is the plugin's.
    """
    patience = Patience(os.getpid(), settings.timeout, _BUSY * settings.timeout)
    in_main = threading.current_thread() is threading.main_thread()
    set_one = _by_signal if settings.method == "signal" and in_main else _by_thread
    set_one(item, settings, patience)


def _by_signal(item: Any, settings: Any, patience: Patience) -> None:
    looks = iter(range(1, _MOST))

    def look(signum: int, frame: Any) -> None:
        __tracebackhide__ = True
        if next(looks, None) is None or not patience.lasts():
            cancel()
            pytest_timeout.timeout_sigalrm(item, settings)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, settings.timeout)


def _by_thread(item: Any, settings: Any, patience: Patience) -> None:
    ended = threading.Event()

    def watch() -> None:
        for _ in range(_MOST):
            if ended.wait(settings.timeout):
                return
            if not patience.lasts():
                break
        pytest_timeout.timeout_timer(item, settings)

    def cancel() -> None:
        ended.set()
        thread.join()

    thread = threading.Thread(target=watch, name=f"patience {item.nodeid}", daemon=True)
    item.cancel_timeout = cancel
    thread.start()
