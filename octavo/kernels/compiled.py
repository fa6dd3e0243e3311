"""Kernels compiled ahead, in parallel, before the first of them runs; imported only where Triton runs.

Triton compiles a kernel when it is launched for the first time: half a second each, one after the other. Here
all launches are first made without running anything, and missing kernels are compiled by as many threads as
there are cores. Threads suffice: most of the time goes to LLVM and ptxas, which let other threads run.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from typing import Any

import torch
import triton
from triton import knobs

from octavo.kernels.launch import dry_run

# More threads would wait for the interpreter's lock.
_MAX_THREADS = 16


class _Counter:
    """Counts the kernels that this process compiled or loaded from the cache."""

    def __init__(self) -> None:
        self.number = 0
        self._lock = threading.Lock()
        self._next = knobs.compilation.listener
        knobs.compilation.listener = self

    def __call__(self, **event: Any) -> None:
        """Count one more kernel; called by Triton."""
        with self._lock:
            self.number += 1
        if self._next is not None:
            self._next(**event)


_counter = _Counter()


def num_kernels() -> int:
    """Return how many kernels this process compiled or loaded from the cache so far."""
    return _counter.number


class _Loaders(Executor):
    """Threads that compile kernels and load them onto the current device."""

    def __init__(self) -> None:
        num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(
            num_threads, initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)
        )
        self.futures: list[Future[Any]] = []

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        """Start to compile a kernel."""

        def load() -> Any:
            kernel = compile_kernel()
            # Reading it loads the kernel, and compiles the C function that launches it.
            _ = kernel.run
            return kernel

        self.futures.append(self._threads.submit(load))
        return self.futures[-1]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See Executor."""
        self._threads.shutdown(wait, cancel_futures=cancel_futures)


def compile_kernels(launch_all: Callable[[], None], progress: Callable[[int, int], None]) -> None:
    """Compile or load every kernel that some launches need, for the current device.

    Args:
        launch_all: launches them; no kernel runs, so results are arbitrary. Only kernels launched by
            octavo.kernels.launch are gone through.
        progress: called with (kernels done, kernels in all).

    Raises:
        Exception: a kernel does not compile, or the cache of kernels cannot be written.
    """
    loaders = _Loaders()
    try:
        with triton.AsyncCompileMode(loaders):
            with dry_run():
                launch_all()
            for number, _ in enumerate(as_completed(loaders.futures), start=1):
                progress(number, len(loaders.futures))
    finally:
        loaders.shutdown(cancel_futures=True)
