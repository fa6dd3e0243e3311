"""Everything CI checks, in order, stopping at the first failure: format, lint, types, imports, tests."""

import subprocess
import sys
import time

LINT = (
    ("format", ["ruff", "format", "--check", "."]),
    ("lint", ["ruff", "check", "."]),
    ("types", ["pyright", "--warnings"]),
    ("import contracts", ["lint-imports", "--no-cache"]),
)
# Most tests are small and single-threaded: two processes of one thread each use two cores best. Each begins
# with half of the files, so that most fixtures are made once, and takes tests from the other when it is done.
TESTS = (
    (
        "tests",
        [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "2",
            "--dist",
            "worksteal",
            "-m",
            "not gpu",
            "--durations=12",
            "tests",
        ],
    ),
)


def main() -> int:
    steps = LINT if "--lint-only" in sys.argv[1:] else LINT + TESTS
    for name, command in steps:
        start = time.monotonic()
        print(f"== {name}: {' '.join(command)}", flush=True)
        if subprocess.run(command).returncode != 0:
            print(f"== {name} failed", flush=True)
            return 1
        print(f"== {name}: ok in {time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
