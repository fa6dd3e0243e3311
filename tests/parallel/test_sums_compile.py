"""Kernels that sum over ranks compile for a GPU; where there is none, nothing else runs them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def test_sums_compile_with_wide_accesses_and_as_many_meetings_as_meant() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compile_sums.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert len(figures) == 12
    for name, used in figures.items():
        # Two programs of 16 warps find room on a multiprocessor: all programs are on the GPU at once.
        assert used["stack"] == 0, name
        assert used["registers"] <= 64, name
        assert used["meetings"] == (2 if name.startswith("two-shot") else 1), name
        assert used["wide"] > 0, name
        assert used["narrow"] == 0, name
