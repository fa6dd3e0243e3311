"""tests/gpu_sanitize.txt, which `make gpu-sanitize` reads, names a test for every file of kernels."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENTRIES = [
    line.split(" ")
    for line in (ROOT / "tests" / "gpu_sanitize.txt").read_text().splitlines()
    if not line.startswith("#")
]
KERNEL = re.compile(r"^@(triton|gluon)\.jit\b", re.MULTILINE)


def test_every_file_of_kernels_has_a_test_under_the_sanitizer() -> None:
    files = [path for path in (ROOT / "octavo").rglob("*.py") if KERNEL.search(path.read_text())]
    assert {path.relative_to(ROOT).as_posix() for path in files} == {kernels for kernels, _ in ENTRIES}


# Tests of attention choose Triton's interpreter for their process where there is no GPU: this one's too.
@pytest.mark.parametrize("room", ["attention", "engine", "layers", "ops"])
def test_the_tests_exist(room: str) -> None:
    ids = sorted({test for _, test in ENTRIES if test.startswith(f"tests/{room}/")})
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *ids]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if "::" in line] == ids


def test_every_test_is_of_a_room_that_was_looked_at() -> None:
    assert {test.split("/")[1] for _, test in ENTRIES} == {"attention", "engine", "layers", "ops"}
