"""Runs the tests that need compiled kernels in a process without Triton's interpreter.

In a run of all tests the interpreter is on, since kernels of attention run in it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from triton_layer_cases import INTERPRETED


@pytest.mark.skipif(not INTERPRETED, reason="they run in this process")
def test_what_needs_compiled_kernels() -> None:
    chosen = ["-m", "compiled and not gpu and not slow", str(Path(__file__).parent)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= 300
