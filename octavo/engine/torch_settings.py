"""Settings of PyTorch that the engine shares with the program: the default device, and the number of threads.

The threads of a step on a CPU wait for one another hundreds of times. If one is taken off its core, the
others wait for a whole time slice, so that two threads on two busy cores are slower than one. It shows in the
thread that drives the step: for much of the time it is on no core, because another process has it, or because
it sleeps until a late thread comes. Steps then get fewer threads.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_default_device(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Wrap a function so that tensors it makes without a device are on the CPU, PyTorch's own default.

    PyTorch keeps a default device as a mode of the thread that set it, which every call of its functions
    consults. The wrapper bypasses such modes. Entering torch.device("cpu") instead would slow each call down,
    and an interrupt meanwhile could leave the program without its own default device.
    """

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


# A step was delayed if its thread was off its core for more than this part of it, and for longer than this.
_DELAYED_PART, _DELAYED_S = 0.25, 1e-3
# Most steps that run with fewer threads before all of them are tried again.
_MOST_STEPS = 63


def _clock() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


class StepThreads:
    """Gives steps all of torch's threads, or fewer after a step that was delayed.

    Each delayed step costs a thread, for about four times as many steps as the last time. Each step that ran
    with all threads without a delay takes one from that number.
    """

    def __init__(self, clock: Callable[[], tuple[float, float]] = _clock) -> None:
        """Keep a function that returns the time, and this thread's time on a core, in seconds."""
        self._clock = clock
        self._fewer = self._steps_left = self._next_steps = 0

    @contextmanager
    def for_step(self) -> Iterator[None]:
        """Set torch's threads for a step; afterwards there are as many as before."""
        num_threads = torch.get_num_threads()
        if num_threads == 1:
            yield
            return
        step_threads = max(1, num_threads - self._fewer)
        if self._fewer:
            torch.set_num_threads(step_threads)
        begun, busy = self._clock()
        try:
            yield
        finally:
            now, busy_now = self._clock()
            if self._fewer:
                torch.set_num_threads(num_threads)
        off_core_s = (now - begun) - (busy_now - busy)
        self._learn(off_core_s > max(_DELAYED_S, _DELAYED_PART * (now - begun)), step_threads)

    def _learn(self, was_delayed: bool, step_threads: int) -> None:
        if was_delayed and step_threads > 1:
            self._fewer += 1
            self._steps_left = self._next_steps
            self._next_steps = min(4 * self._next_steps + 3, _MOST_STEPS)
        elif self._steps_left:
            self._steps_left -= 1
        elif self._fewer:
            self._fewer = 0
        else:
            self._next_steps = max(0, self._next_steps - 1)
