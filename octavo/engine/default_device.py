"""Keeps a default device of PyTorch's that the program has set out of the engine."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")


def without_default_device(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return the function so that tensors it makes without a device are on the CPU, as by PyTorch's default.

    PyTorch keeps a default device as a mode that every call of its functions asks, in the thread that set it.
    No mode of that kind is asked here. To enter torch.device("cpu") instead would slow each call down, and
    an interrupt meanwhile could leave the program without its own default device.
    """

    @functools.wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run
