"""Runs checks that depend on shapes, strides, dtypes and devices only once for calls that are alike.

The checks of a small call take longer than the call.
"""

import functools
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
_MOST = 1024


def once(check: Callable[..., Result]) -> Callable[..., Result]:
    """Return the check with a cache: it runs once for arguments that are alike. Refusals are not kept.

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
            # No valid argument is unhashable, so the check refuses it.
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
    # Equal values of different types, such as 1 and True, are not alike.
    return None if value is None else (value.__class__, value)
