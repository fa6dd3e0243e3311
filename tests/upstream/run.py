"""Run sampled cases of other projects' tests on Octavo's operators.

    python tests/upstream/run.py --flash-attention ../flash-attention --vllm ../vllm --jobs 8

Each case is the upstream function called with one point of its parametrisation. Cases are drawn with a fixed
seed until enough have run: what upstream skips, and what suites.py leaves out, is counted beside them.
Needs torch with a GPU, pytest and einops; `--device cpu` tries the runner itself without a GPU.
"""

import argparse
import collections
import contextlib
import io
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from suites import SUITES, Case, Suite

HERE = Path(__file__).parent


def read_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--flash-attention", type=Path, help="checkout of github.com/Dao-AILab/flash-attention"
    )
    parser.add_argument("--vllm", type=Path, help="checkout of github.com/vllm-project/vllm")
    parser.add_argument(
        "--suite", action="append", choices=SUITES, help="default: all of the given checkouts"
    )
    parser.add_argument("--cases", type=int, default=5000, help="cases that run, for each suite")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case of any suite begins later")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--where", default="True", help="only cases of which this Python expression is true")
    parser.add_argument("--list", action="store_true", help="count cases, run none")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def parametrisation(function: Any) -> list[tuple[list[str], list[Any]]]:
    """Names and values of every pytest.mark.parametrize of a function."""
    axes = []
    for mark in function.pytestmark:
        if mark.name == "parametrize":
            names = [name.strip() for name in mark.args[0].split(",")]
            axes.append((names, [getattr(value, "values", value) for value in mark.args[1]]))
    return axes


def make_case(axes: list[tuple[list[str], list[Any]]], index: int) -> Case:
    """Arguments of the index-th point of a parametrisation."""
    case: Case = {}
    for names, values in axes:
        index, place = divmod(index, len(values))
        value = values[place]
        case.update(zip(names, [value] if len(names) == 1 else value, strict=True))
    return case


def draw_cases(function: Any, name: str, options: argparse.Namespace) -> Iterator[Case]:
    """Cases of this process's part, in random order."""
    axes = parametrisation(function)
    indices = list(range(math.prod(len(values) for _, values in axes)))
    random.Random(f"{options.seed}/{name}").shuffle(indices)
    for index in indices[options.part :: options.jobs]:
        case = make_case(axes, index)
        if eval(options.where, {}, case):  # noqa: S307 - given by who runs it
            yield case


def run_case(function: Any, suite: Suite, case: Case) -> tuple[str, str]:
    """Outcome of one case (passed, skipped, excepted, failed or lacked memory), and why."""
    import pytest
    import torch

    if reason := suite.exception(case):
        return "excepted", reason
    try:
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            function(**case)
    except pytest.skip.Exception as skip:
        return "skipped", str(skip)
    except torch.OutOfMemoryError as error:
        return "lacked memory", str(error)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {str(error).strip()[:300]}"
    finally:
        torch.set_default_device(None)
        if torch.cuda.is_available():  # the processes share a GPU
            torch.cuda.empty_cache()
    return "passed", ""


def run_suite(name: str, options: argparse.Namespace, end: float) -> dict[str, Any]:
    """Run one suite's part; return counts, reasons of exceptions, and failures with their arguments.

    No case begins after `end`, of time.monotonic.
    """
    import modules

    suite = SUITES[name]
    function = modules.load(suite, getattr(options, suite.checkout.replace("-", "_")), options.device)
    counts: collections.Counter[str] = collections.Counter()
    report: dict[str, Any] = {"reasons": {}, "failures": []}
    wanted = math.ceil(options.cases / options.jobs)
    for case in draw_cases(function, name, options):
        if options.list:
            counts["collected"] += 1
            continue
        if counts["passed"] + counts["failed"] >= wanted or time.monotonic() > end:
            break
        outcome, why = run_case(function, suite, case)
        counts[outcome] += 1
        if outcome == "excepted":
            report["reasons"][why] = report["reasons"].get(why, 0) + 1
        if outcome == "failed":
            report["failures"].append([str(case), why])
            if "CUDA error" in why:
                break  # the device answers nothing more in this process
    return report | {"counts": counts}


def run_part(names: list[str], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run this process's part of every suite and return its report."""
    import modules

    end = time.monotonic() + options.seconds
    modules.install()
    return {name: run_suite(name, options, end) for name in names}


def run_parts(names: list[str], options: argparse.Namespace) -> list[dict[str, dict[str, Any]]]:
    """Run the parts, each in a process of its own if there are several, and return their reports."""
    if options.jobs == 1:
        options.part = 0
        return [run_part(names, options)]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, str(part)) for part in range(options.jobs)]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--part", str(part), "--report", str(path)]
            )
            for part, path in enumerate(paths)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit("a process ended without a report")
        return [json.loads(path.read_text()) for path in paths]


def print_summary(names: list[str], parts: list[dict[str, dict[str, Any]]]) -> int:
    """Print a line for each suite, what was left out and what failed; return the number of failures."""
    failed = 0
    for name in names:
        counts = sum((collections.Counter(part[name]["counts"]) for part in parts), collections.Counter())
        print(f"{name:12}", ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(counts.items())))
        for edit in SUITES[name].edits:
            print(f"  changed: {edit.reason}")
        reasons = sum((collections.Counter(part[name]["reasons"]) for part in parts), collections.Counter())
        for reason, count in reasons.items():
            print(f"  left out ({count:,}): {reason}")
        failures = [failure for part in parts for failure in part[name]["failures"]]
        for case, why in failures[:20]:
            print(f"  FAILED {case}\n    {why}")
        failed += len(failures)
        if not counts.total() - counts["skipped"]:
            print("  FAILED: no case ran")
            failed += 1
    return failed


def main() -> int:
    """Run all parts, or one of them."""
    options = read_arguments()
    given = {name for name in ("flash-attention", "vllm") if getattr(options, name.replace("-", "_"))}
    names = options.suite or [name for name, suite in SUITES.items() if suite.checkout in given]
    missing = sorted({SUITES[name].checkout for name in names} - given) or (
        [] if names else ["flash-attention"]
    )
    if missing:
        raise SystemExit(f"no checkout given: --{missing[0]} PATH")
    if options.part is None:
        start = time.monotonic()
        failed = print_summary(names, run_parts(names, options))
        print(f"seed {options.seed}, {time.monotonic() - start:.0f} s, {failed} failed")
        return 1 if failed else 0
    options.report.write_text(json.dumps(run_part(names, options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
