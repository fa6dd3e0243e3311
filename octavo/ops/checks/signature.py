"""Tells calls apart by shapes, strides, dtypes and devices, so that what follows from these is done once.

The checks of a small call take longer than the call.
"""

import functools
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.repeat import Repeater

_MOST = 1024


class Alike(NamedTuple):
    """What is common to calls that differ only in the numbers in their tensors.

    Attributes:
        num_sequences: B, from the check.
        repeater: runs them on a GPU.
    """

    num_sequences: int
    repeater: Repeater


def once(check: Callable[..., int]) -> Callable[..., Alike]:
    """Return the check with a cache: it runs once for calls that are alike. Refusals are not kept.

    The check takes tuples, and must read of a tensor in them its shape, strides, dtype and device only. What
    is in `also` tells calls apart too; the check does not take it.
    """
    known: dict[Hashable, Alike] = {}

    @functools.wraps(check)
    def checked(*groups: tuple, also: tuple = ()) -> Alike:
        if torch.compiler.is_compiling():
            return Alike(check(*groups), Repeater())
        key = _describe((*groups, also))
        try:
            alike = known.get(key)
        except TypeError:
            # No valid argument is unhashable, so the check refuses it.
            return Alike(check(*groups), Repeater())
        if alike is None:
            alike = Alike(check(*groups), Repeater())
            if len(known) >= _MOST:
                known.clear()
            known[key] = alike
        return alike

    return checked


def _describe(groups: tuple[tuple, ...]) -> tuple[Hashable, ...]:
    key: list[Hashable] = []
    for group in groups:
        for value in group:
            if value is None:
                key.append(None)
            elif isinstance(value, Tensor):
                # Kernels are compiled for pointers to multiples of 16 bytes, or for others.
                offset = value.data_ptr() % 16 if value.is_cuda else 0
                key += (value.shape, value.stride(), value.dtype, value.device, offset)
            else:
                # Equal values of different types, such as 1 and True, are not alike.
                key += (value.__class__, value)
    return tuple(key)
