"""What tests of `octavo.ray:app` share: a tiny model with its options, and programs that run Ray."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tiny_model import TINY_LLAMA

NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="needs octavo[ray]; see `make ray-test`")
HERE = Path(__file__).parent
KEY = "a-long-enough-key"
OPTIONS = """
load_format = "dummy"
num_blocks = 2048
block_size = 16
device = "cpu"
[serve]
replicas = 2
shutdown_timeout = 90
served_model_name = "tiny"
"""


def write_options(folder: Path) -> None:
    """Write a model's configuration, and octavo.toml that names it."""
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, "max_position_embeddings": 4096}))
    (folder / "octavo.toml").write_text(f"model = {json.dumps(str(folder))}\n{OPTIONS}")


def environment() -> dict[str, str]:
    """Return variables for processes that run Ray."""
    path = os.pathsep.join([os.getcwd(), str(HERE), *sys.path])
    # The file of a working directory may not set keys.
    own = {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "OCTAVO_API_KEY": KEY}
    return {**os.environ, **own}


def run_program(name: str, folder: Path, timeout_s: float) -> dict[str, Any]:
    """Run a file of this folder in a process of its own, as Ray leaves threads and warnings behind.

    Args:
        name: the file.
        folder: with octavo.toml; the process' working directory.
        timeout_s: seconds that it may take.

    Returns:
        The JSON that it printed.
    """
    done = subprocess.run(
        [sys.executable, str(HERE / name)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=folder,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
