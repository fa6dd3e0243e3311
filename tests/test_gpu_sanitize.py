"""What needs a GPU is run there: by `make gpu-test`, and for every file of kernels by `make gpu-sanitize`."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENTRIES = [
    line.split(" ")
    for line in (ROOT / "tests" / "gpu_sanitize.txt").read_text().splitlines()
    if not line.startswith("#")
]
KERNEL = re.compile(r"^@(triton|gluon)\.jit\b", re.MULTILINE)
# What a machine with two Hopper GPUs collects: tests ask for the GPU when they are imported.
COLLECT = """
import sys, pytest, torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_capability = lambda device=None: (9, 0)
sys.exit(pytest.main(["-q", "--collect-only", "-m", "gpu", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def missing(tests: set[str]) -> set[str]:
    """Those of the tests' ids that a machine with GPUs would not find, or not among its GPU tests."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    files = sorted({test.partition("::")[0] for test in tests})
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *files], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return tests - set(done.stdout.splitlines())


def test_every_file_of_kernels_has_a_test_under_the_sanitizer() -> None:
    files = [path for path in (ROOT / "octavo").rglob("*.py") if KERNEL.search(path.read_text())]
    assert {path.relative_to(ROOT).as_posix() for path in files} == {kernels for kernels, _ in ENTRIES}


def test_a_machine_with_gpus_finds_the_tests() -> None:
    """One id that it does not find, and `make gpu-sanitize` runs none."""
    unknown = "tests/layers/test_triton_layers.py::test_rms_norm[of no size]"
    assert missing({test for _, test in ENTRIES} | {unknown}) == {unknown}


def test_make_gpu_test_runs_every_room_with_such_tests() -> None:
    """tests/parallel comes last, one by one."""
    listed = re.search(r"^GPU_TESTS := .*tests/,(.*)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed is not None
    tests = [path for path in (ROOT / "tests").rglob("*.py") if "pytest.mark.gpu" in path.read_text()]
    rooms = {path.relative_to(ROOT / "tests").parts[0] for path in tests} - {Path(__file__).name}
    assert rooms == {*listed[1].split(), "parallel"}
