"""Checks that depend on shapes, strides, dtypes and devices only, made once for calls that are alike.

A small call takes less time than its checks do.
"""

import functools
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
_MOST = 1024


def once(check: Callable[..., Result]) -> Callable[..., Result]:
    """Return the check with its results kept for groups of arguments that are alike; refusals are not kept.

    The check takes tuples, and must read of a tensor in them its shape, strides, dtype and device only.
    """
    results: dict[Hashable, Result] = {}

    @functools.wraps(check)
    def checked(*groups: tuple) -> Result:
        if torch.compiler.is_compiling():
            return check(*groups)
        key = tuple([_describe(value) for group in groups for value in group])
        try:
            result = results.get(key)
        except TypeError:
            # What cannot be hashed is not what any argument should be: the check says so.
            return check(*groups)
        if result is None:
            result = check(*groups)
            if len(results) >= _MOST:
                results.clear()
            results[key] = result
        return result

    return checked


def _describe(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    # Equal values of several types, such as 1 and True, are not alike.
    return None if value is None else (value.__class__, value)
