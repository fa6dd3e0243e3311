"""Two commits of Octavo on one NVIDIA GPU, in turn: does a change make serving slower?

Each round runs the workloads of gpu_serving.py with the other tree's engine, then with this one's, each in a
fresh process. Prints each workload's first run, best run and the ratio of the best beside the physical bound.

    git worktree add ../before COMMIT
    python benchmarks/gpu_compare.py --before ../before [--model 0.6b] [--workloads nano,shared,mid,single]
                                     [--rounds 2] [--runs 3] [--save MACHINE]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from support.common import make_parser, publish, sources, table
from support.gpu_bound import SHAPES, bound_s
from support.gpu_workloads import WORKLOADS

HERE = Path(__file__).parents[1]
Rates = dict[str, list[float]]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--before", type=Path, help="folder of the other tree")
    parser.add_argument("--model", choices=SHAPES, default="0.6b")
    parser.add_argument("--workloads", default="nano,shared,mid,single")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of a workload in one process after its first"
    )
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        print(json.dumps(measure_engine(arguments)))
        return
    if arguments.before is None:
        parser.error("--before is missing: the folder of the tree to compare with")
    compare(arguments)


def measure_engine(arguments: argparse.Namespace) -> Rates:
    """Run every workload with the engine that this process imports; rates in order, the first run first."""
    from support.gpu_model import load, run

    llm = load(arguments.model)
    rates: Rates = {}
    for name in arguments.workloads.split(","):
        workload = WORKLOADS[name]()
        rates[name] = [workload.rate(run(llm, workload)) for _ in range(arguments.runs + 1)]
    return rates


def run_tree(tree: Path, arguments: argparse.Namespace) -> Rates:
    """Measure a tree's engine in a process of its own."""
    command = [sys.executable, __file__, "--engine", "--model", arguments.model]
    command += ["--workloads", arguments.workloads, "--runs", str(arguments.runs)]
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
    done = subprocess.run(command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(arguments: argparse.Namespace) -> None:
    """Run both trees in turn and print the table."""
    from support.gpu_timing import copy_bandwidth, matrix_flops

    start = time.monotonic()
    rounds = [
        {"before": run_tree(arguments.before, arguments), "after": run_tree(HERE, arguments)}
        for _ in range(arguments.rounds)
    ]
    bandwidth, flops = copy_bandwidth(), matrix_flops()
    rows, results = [], {}
    for name in arguments.workloads.split(","):
        workload = WORKLOADS[name]()
        bound = workload.rate(bound_s(arguments.model, workload, bandwidth, flops, 2))
        best = {
            label: max(rate for r in rounds for rate in r[label][name][1:]) for label in ("before", "after")
        }
        first = {label: rounds[0][label][name][0] for label in best}
        ratio = best["after"] / best["before"]
        rows.append(
            [
                name,
                *(f"{first[label]:,.0f}" for label in best),
                *(f"{best[label]:,.0f}" for label in best),
                f"{ratio:.3f}",
                f"{best['after'] / bound:.0%}",
                workload.unit,
            ]
        )
        results[name] = {
            "first": first,
            "best": best,
            "ratio": ratio,
            "bound_rate": bound,
            "unit": workload.unit,
        }
    header = [
        "workload",
        "first, before",
        "first, after",
        "best, before",
        "best, after",
        "ratio",
        "of the bound",
        "",
    ]
    print(table(header, rows))
    before = sources(arguments.before / "octavo")
    figures = {"model": arguments.model, "sources_before": before, "rounds": rounds, "results": results}
    publish(f"gpu_compare-{arguments.model}", {**figures, "seconds": time.monotonic() - start}, arguments)


if __name__ == "__main__":
    main()
