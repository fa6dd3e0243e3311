"""Kernels that sum over ranks compile for a GPU; where there is none, nothing else runs them."""

import importlib.util
from pathlib import Path

import pytest
from compiled_figures import compiled_figures

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def test_sums_compile_with_wide_accesses_and_as_many_meetings_as_meant() -> None:
    figures = compiled_figures(Path(__file__).with_name("compile_sums.py"))
    assert len(figures) == 12
    for name, used in figures.items():
        # Two programs of 16 warps find room on a multiprocessor: all programs are on the GPU at once.
        assert used["stack"] == 0, name
        assert used["registers"] <= 64, name
        assert used["meetings"] == (2 if name.startswith("two-shot") else 1), name
        assert used["wide"] > 0, name
        assert used["narrow"] == 0, name
