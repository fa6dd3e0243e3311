"""Everything CI checks, stopping at the first failure: format, lint, imports, then types beside the tests."""

import os
import subprocess
import sys
import tempfile
import time

LINT = (
    ("format", ["ruff", "format", "--check", "."]),
    ("lint", ["ruff", "check", "."]),
    ("import contracts", ["lint-imports", "--no-cache"]),
)
TYPES = ("types", ["pyright", "--warnings"])
# Most tests are small and single-threaded: two processes of one thread each use two cores best. Each begins
# with half of the files, so that most fixtures are made once, and takes tests from the other when it is done.
TESTS = (
    "tests",
    [
        *(sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal"),
        *("-m", "not gpu and not slow", "--durations=12", "tests"),
    ],
)


def run(name: str, command: list[str]) -> bool:
    """Run one step; True if it succeeds."""
    start = time.monotonic()
    print(f"== {name}: {' '.join(command)}", flush=True)
    passed = subprocess.run(command).returncode == 0
    print(f"== {name}: {'ok' if passed else 'failed'} in {time.monotonic() - start:.0f} s", flush=True)
    return passed


def main() -> int:
    if not all(run(*step) for step in LINT):
        return 1
    if "--lint-only" in sys.argv[1:]:
        return 0 if run(*TYPES) else 1
    # Tests start some hundred processes: they read bytecode instead of compiling the package again. It lies
    # where Python puts it: elsewhere that of the libraries, which pip has made, would not be found.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Pyright alone would leave a core idle: niced so far that it ends before the tests, and hardly slows
    # those that watch a clock.
    name, command = TYPES[0], ["nice", "-n", "5", *TYPES[1]]
    with (
        tempfile.TemporaryFile("w+") as report,
        subprocess.Popen(command, stdout=report, stderr=report) as types,
    ):
        passed = run(*TESTS)
        typed = types.wait() == 0
        report.seek(0)
        print(f"== {name}: {' '.join(command)}\n{report.read()}== {name}: {'ok' if typed else 'failed'}")
    return 0 if passed and typed else 1


if __name__ == "__main__":
    sys.exit(main())
