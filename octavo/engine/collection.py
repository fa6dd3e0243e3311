"""When Python looks for garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Container objects made before the youngest are looked through, and how often that is done before others are:
# by default 700, and 10 times each.
_THRESHOLDS = (100_000, 100, 1_000_000)


def collect_youngest() -> None:
    """Look through what has just been made: prompts, while a device works. Long ones take a while.

    Otherwise Python does so first thing after a run.
    """
    gc.collect(0)


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Keep Python from full garbage collections; what has just been made is looked through now and then.

    A full collection visits every object of the process: with a model's libraries loaded and long prompts
    waiting, 0.1 to 0.2 s in the middle of a step. Requests leave no reference cycles that would need one.
    """
    thresholds = gc.get_threshold()
    if thresholds == _THRESHOLDS:
        # Another call under way set them, and sets them back.
        yield
        return
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
