"""Packs and decodes weights in one thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_num_inside = 0
_num_threads = 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's operators on a CPU in this thread alone.

    Blocks are packed and decoded by thousands of operators of some microseconds each. Where another process
    has a core, the wait for a second thread takes longer than all of them. Threads may overlap: the number
    of threads from before the first one came is the one that all leave behind.
    """
    global _num_inside, _num_threads
    with _lock:
        if _num_inside == 0:
            _num_threads = torch.get_num_threads()
        _num_inside += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            torch.set_num_threads(_num_threads)
