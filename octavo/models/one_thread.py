"""A context in which weights are packed and decoded by one thread."""

import threading

import torch


class _OneThread:
    """Run torch's operators on a CPU in this thread only: `with one_thread:`.

    Blocks are packed and decoded by thousands of operators of some microseconds each. Where another process
    has a core, the wait for a second thread takes longer than all of them. Threads may overlap: the number
    of threads from before the first one came is the one that all leave behind.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._num_threads_before = 1

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._num_threads_before = torch.get_num_threads()
            self._num_inside += 1
            torch.set_num_threads(1)

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._num_inside -= 1
            torch.set_num_threads(self._num_threads_before)


one_thread = _OneThread()
