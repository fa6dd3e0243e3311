"""The append kernel compiles for a GPU in each of its forms, and keeps its numbers in registers."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


# Importing Triton here would define its functions before another test asks for the interpreter.
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_append_compiles():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_append.py")
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    kernels = [json.loads(line.replace("'", '"')) for line in result.stdout.splitlines()]
    assert len(kernels) == 4
    assert all(kernel["stack"] == 0 for kernel in kernels)
