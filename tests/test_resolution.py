"""What users install resolves from the package index alone, for every Python, whatever this machine has.

uv reads metadata only, about 30 files. Without the index nothing is known: in CI that is a failure, elsewhere
the tests are skipped, and pytest's summary says why.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = ROOT / "constraints.txt"
CLIENTS = sorted((ROOT / "tests" / "server" / "clients" / "requirements").glob("*.txt"))
PYTHONS = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
# llguidance's wheels need glibc 2.31.
LINUX = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31")
# Built by pip: they have no wheels.
SOURCES = {"llama-cpp-python", "sqlitedict", "word2number"}
ENDS = (PYTHONS[0], PYTHONS[-1])


def uv(*arguments: object, python: str, platform: str = LINUX[0]) -> str:
    """Return the versions that uv finds, or fail with its explanation."""
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--no-config",
        "--no-python-downloads",
    ]
    options = [f"--python-version={python}", f"--python-platform={platform}", "--only-binary=:all:"]
    options += [f"--no-binary={name}" for name in sorted(SOURCES)]
    environment = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
    done = subprocess.run(
        [*command, *options, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 2 and "Failed to fetch" in done.stderr and "CI" not in os.environ:
        pytest.skip(f"NOT CHECKED, as the package index cannot be reached: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("python", "platform"), [*((python, LINUX[0]) for python in PYTHONS), (PYTHONS[0], LINUX[1])]
)
def test_all_extras_resolve_as_make_and_the_image_install_them(python: str, platform: str) -> None:
    """All of them together: what resolves for all holds for any choice of them."""
    found = uv(ROOT / "pyproject.toml", "--all-extras", "-c", CONSTRAINTS, python=python, platform=platform)
    pins = re.findall(r"^[\w.-]+==\S+$", CONSTRAINTS.read_text(), re.M)
    assert {pin.replace("_", "-") for pin in pins} <= set(re.findall(r"^[\w.-]+==\S+", found, re.M))


@pytest.mark.parametrize("python", ENDS)
def test_all_extras_resolve_without_constraints(python: str) -> None:
    uv(ROOT / "pyproject.toml", "--all-extras", python=python)


@pytest.mark.parametrize("path", CLIENTS, ids=lambda path: path.stem)
def test_clients_of_others_resolve(path: Path) -> None:
    """Each in an environment of its own, with the oldest Python: some of them know 3.14 only from sources."""
    uv(path, python=PYTHONS[0])


def test_the_oldest_transformers_resolves_beside_the_rest(tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    (old,) = re.findall(r"^\t+(transformers==\S+) '(huggingface-hub\S+)' (.*)$", makefile, re.M)
    path = tmp_path / "requirements.txt"
    path.write_text("\n".join([*old[:2], *old[2].split(), "-c rest.txt"]))
    rest = re.sub(r"^transformers==.*$", "", CONSTRAINTS.read_text(), flags=re.M)
    (tmp_path / "rest.txt").write_text(rest)
    assert "transformers==5.17.0" in uv(path, python=PYTHONS[0])


def test_a_pin_that_the_index_contradicts_is_found(tmp_path: Path) -> None:
    """torch's build with CUDA names its triton; a build for CPUs that lies on a machine names none."""
    contradictory = CONSTRAINTS.read_text().replace("triton==3.7.1", "triton==3.6.0")
    assert contradictory != CONSTRAINTS.read_text()
    (tmp_path / "constraints.txt").write_text(contradictory)
    with pytest.raises(AssertionError, match="triton"):
        uv(ROOT / "pyproject.toml", "-c", tmp_path / "constraints.txt", python=PYTHONS[0])
