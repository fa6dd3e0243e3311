"""Python's garbage collector, kept from stopping the engine in the middle of a step."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# gc.set_threshold's numbers: how many new container objects start a collection of the youngest generation,
# how many of those one of the middle generation, how many of those a full one; (700, 10, 10) by default. The
# first two make collections rare while prompts are read, the last is so large that no full one ever starts.
_THRESHOLDS = (100_000, 100, 1_000_000)
# In steps: new objects that are looked through together, which takes about a millisecond, and how many times
# before those that were left are looked through once more.
_YOUNG = 10_000
_YOUNG_TIMES = 8


def collect_youngest() -> None:
    """Look through the youngest objects now: call it after reading prompts, while a device works.

    Long prompts take a while to look through. Python would otherwise do it right after the run, when nothing
    else hides the time.
    """
    gc.collect(0)


def freeze() -> None:
    """Leave all objects there are out of later collections: those of libraries, which live on anyway."""
    gc.collect()
    gc.freeze()


@contextmanager
def all_lives_on() -> Iterator[None]:
    """Leave all objects that are made meanwhile out of collections, now and later.

    For imports in a process of our own: looking through what PyTorch makes takes 0.3 s.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Keep Python from full garbage collections; young objects are still looked through now and then.

    A full collection visits every object of the process: with a model's libraries loaded and long prompts
    waiting, that stops a step for 0.1 to 0.2 s. Requests leave no reference cycles that would need one.
    """
    thresholds = gc.get_threshold()
    if thresholds == _THRESHOLDS:
        # Another call has set them, and will restore them.
        yield
        return
    try:
        gc.set_threshold(*_THRESHOLDS)
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def paused() -> Iterator[None]:
    """Keep Python's collector off."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


class StepGarbage:
    """Collections in steps at a moment of the engine's choice, a millisecond at a time, and at no other."""

    def __init__(self) -> None:
        self._num_young = 0

    def collect(self) -> None:
        """Look through young objects if there are enough: call it while a device works."""
        if gc.get_count()[0] >= _YOUNG:
            self._num_young += 1
            gc.collect(1 if self._num_young % _YOUNG_TIMES == 0 else 0)
