"""Packs and decodes weights in one thread."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's operators on a CPU in this thread alone.

    Blocks are packed and decoded by thousands of operators of some microseconds each. Where another process
    has a core, the wait for a second thread takes longer than all of them.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
