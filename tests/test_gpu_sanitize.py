"""tests/gpu_sanitize.txt, which `make gpu-sanitize` reads, names a test for every file of kernels."""

import ast
import re
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


@pytest.mark.parametrize("test", sorted({test for _, test in ENTRIES}))
def test_the_tests_exist(test: str) -> None:
    """By file and function: what stands in brackets is told by pytest when they run."""
    path, function = test.partition("[")[0].split("::")
    tree = ast.parse((ROOT / path).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
