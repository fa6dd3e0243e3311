"""What every script here ends with: a table, what went wrong, a last line of JSON, and the exit code."""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import server_process  # noqa: F401  (finds what benchmarks share)
from support.common import figures_table, make_parser, publish

__all__ = ["make_parser", "percentile", "report", "slope"]


def report(name: str, figures: dict[str, Any], arguments: argparse.Namespace) -> int:
    """Print figures, keep them if --save says so, and return the exit code: 1 if `failures` has any."""
    failures: list[str] = figures["failures"]
    plain = {key: value for key, value in figures.items() if not isinstance(value, list | dict)}
    print(figures_table(plain))
    for failure in failures[:20]:
        print("FAILED", failure, file=sys.stderr)
    kept = {
        "load_average": os.getloadavg()[0],
        **figures,
        "num_failures": len(failures),
        "failures": failures[:20],
    }
    publish(f"server_{name}", kept, arguments)
    return 1 if failures else 0


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of 1 .. 99; 0 of nothing."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of a line through points by least squares."""
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope
