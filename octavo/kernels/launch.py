"""How kernels are launched, and how they follow one another; imported only where Triton runs.

Programmatic dependent launch lets a kernel start, and load weights, while the one before it still runs:

    kernel A   start_next()  ......................... done
    kernel B     weights ...... wait_for_previous()   | reads what A wrote

Every kernel launched so must wait before it reads or writes anything that another kernel may touch, and must
wait even if it has nothing to read: its own end tells the kernel after it that all before it have ended. No
wait is needed for data that was written before the last normally launched kernel: decode attention reads its
map and the keys of earlier steps that way.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.device import can_overlap
from octavo.kernels.repeat import running

_Values = TypeVar("_Values", bound=tuple[Any, ...])


class _Mode(threading.local):
    is_dry = False


_mode = _Mode()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel, as kernel[grid](*arguments, **options) does; in a dry run only compile it."""
    watch = running.watch
    if watch is None:
        kernel.run(*arguments, grid=grid, warmup=_mode.is_dry, **options)
    else:
        watch.launch(kernel, grid, arguments, options)


@contextmanager
def dry_run() -> Iterator[None]:
    """Let this thread's launches compile kernels and run none."""
    _mode.is_dry = True
    try:
        yield
    finally:
        _mode.is_dry = False


def is_dry_run() -> bool:
    """Say whether this thread's launches run nothing."""
    return _mode.is_dry


# Benchmarks switch it off to measure its effect.
OVERLAP = True
# Made once, since every launch copies them.
_TOGETHER = {"OVERLAP": True, "launch_pdl": True}
_APART = {"OVERLAP": False}


def overlaps(tensor: Tensor) -> bool:
    """Say whether a kernel that will run where a tensor lives starts while the one before it still runs."""
    return OVERLAP and can_overlap(tensor.device)


def overlap_options(tensor: Tensor) -> dict[str, bool]:
    """Return OVERLAP, a kernel's constexpr, and Triton's launch option that goes with it.

    Args:
        tensor: lives where the kernel will run.

    Returns:
        Keyword arguments of a launch; callers must not change them.
    """
    return _TOGETHER if overlaps(tensor) else _APART


@lru_cache(maxsize=None, typed=True)
def constants(values: _Values) -> _Values:
    """Return a named tuple of a kernel's constants, known when it is compiled; made once for equal values."""
    return values._make(map(tl.constexpr, values))  # type: ignore[attr-defined]


def varying(number: int) -> int:
    """Return what a kernel reads as `number` by number_of: 2 number + 1.

    Triton compiles a kernel anew for integers that are 1, and for multiples of 16. do_not_specialize prevents
    that for arguments, but not for integers in tuples, which therefore are passed so if they differ from call
    to call.

    Args:
        number: from 1 to 2^30 - 1; 0 is a kernel of its own.
    """
    return 2 * number + 1


@triton.jit
def number_of(varying):
    """Return the number that was passed as varying(number)."""
    return varying >> 1


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    """Let the next kernel's programs start once every program of this one has got here."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Wait until the kernel before this one has ended and its writes can be seen."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
