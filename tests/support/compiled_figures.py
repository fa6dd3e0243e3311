"""What the assembler makes of kernels for a Hopper GPU, found without a GPU.

As a script, it runs the scripts whose paths it reads: importing PyTorch and Triton takes as long as compiling
what most of them do, so one process is there for all of a capability.
"""

import atexit
import io
import json
import os
import runpy
import subprocess
import sys
import traceback
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any


def compiled_figures(script: Path) -> dict[str, Any]:
    """Run a script that compiles kernels and prints JSON, in a process without Triton's interpreter."""
    # Helpers read it when they are imported, so each has a process of its own.
    process = _compiler(os.environ.get("COMPILED_CAPABILITY", "90"))
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{script}\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline() or '{"error": "its process ended"}')
    assert "error" not in answer, f"{script}: {answer['error']}"
    return json.loads(answer["output"])


@cache
def _compiler(capability: str) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["COMPILED_CAPABILITY"] = capability
    # Scripts of any room import what all share.
    helpers = str(Path(__file__).parent)
    environment["PYTHONPATH"] = os.pathsep.join([helpers, environment.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, __file__], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    # It ends with its input.
    atexit.register(process.communicate)
    return process


def _answer(script: str) -> dict[str, str]:
    output = io.StringIO()
    try:
        # Scripts import others beside them, as when Python runs them.
        sys.path.insert(1, str(Path(script).parent))
        with redirect_stdout(output):
            runpy.run_path(script, run_name="__main__")
    except Exception:
        return {"error": traceback.format_exc()}
    return {"output": output.getvalue()}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(_answer(line.rstrip("\n"))), flush=True)
