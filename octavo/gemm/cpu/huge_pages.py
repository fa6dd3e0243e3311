"""Memory of weights on a CPU: huge pages, and what loading leaves behind.

A core streams weights from huge pages a quarter faster than from pages of 4 KiB.
"""

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
# Address space that is taken at a time; memory is taken page by page, when it is written.
_REGION = 64 << 20
_LINE = 64


class HugePages:
    """Memory for tensors that lie next to one another; a part of it lives as long as one of its tensors."""

    def __init__(self) -> None:
        """Take nothing yet; a system without huge pages gives small ones."""
        self._left = torch.empty(0, dtype=torch.uint8)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros, which takes memory where it is written."""
        num_bytes = prod(shape) * dtype.itemsize
        # Whole lines of the cache.
        room = -(-num_bytes // _LINE) * _LINE
        if room > len(self._left):
            self._left = _region(max(room, _REGION))
        place, self._left = self._left[:num_bytes], self._left[room:]
        return place.view(dtype).view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor."""
        return self.zeros(tensor.shape, tensor.dtype).copy_(tensor)


def _region(num_bytes: int) -> Tensor:
    pages = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    return memory[-memory.data_ptr() % _HUGE_PAGE :]


def return_freed_memory() -> None:
    """Return freed heap pages to the operating system, where the C library can do that (glibc).

    Packed weights lie between freed temporaries of the same sizes: without this, a third of the process's
    memory is holes once a model is loaded.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
