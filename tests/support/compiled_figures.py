"""What the assembler makes of kernels for a Hopper GPU, found without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# Scripts of any room import what all share.
_HELPERS = Path(__file__).parent


def compiled_figures(script: Path) -> dict[str, Any]:
    """Run a script that compiles kernels and prints JSON, in a process without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(_HELPERS), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
