"""Fewer settings of tests that take long on a CPU, above all in Triton's interpreter."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch


def fewer(names: str | tuple[str, ...], settings: Sequence[Any], *, every: int = 2) -> pytest.MarkDecorator:
    """Parametrise a test: all settings where there is a GPU, else one of each few; the others are slow tests.

    Args:
        names: of one parameter, or of several, each of whose settings is a tuple.
        settings: the values.
        every: of how many settings in a row the first is not slow.
    """
    marked = []
    for number, setting in enumerate(settings):
        values = setting if isinstance(names, tuple) else (setting,)
        is_slow = number % every > 0 and not torch.cuda.is_available()
        marked.append(pytest.param(*values, marks=pytest.mark.slow if is_slow else []))
    return pytest.mark.parametrize(names, marked)
