"""Run the benchmarks for this machine: those for NVIDIA GPUs if it has one, else those for CPUs.

    python benchmarks/run_all.py [--save MACHINE] [--commit ID]

Each prints a table and a last line of JSON. --save MACHINE also keeps the JSON under benchmarks/results.
"""

import subprocess
import sys
from pathlib import Path

import torch
from support.common import make_parser

ON_GPU = (
    ["gpu_serving.py", "--model", "0.6b"],
    ["gpu_serving.py", "--model", "8b"],
    ["gpu_open_loop.py", "--special"],
    ["gpu_serve.py"],
    ["gpu_step.py"],
    ["gpu_attention.py", "--block-sizes", "64"],
    ["gpu_forest.py"],
    ["gpu_deterministic.py"],
)
ON_CPU = (
    ["cpu_throughput.py"],
    ["cpu_context.py"],
    ["cpu_accuracy.py"],
    ["cpu_linear.py"],
    ["cpu_serving.py"],
    ["serving_front_end.py"],
)


def main() -> int:
    arguments = make_parser(__doc__).parse_args()
    common = [f"--{name}={value}" for name, value in vars(arguments).items() if value]
    here = Path(__file__).parent
    for script, *options in ON_GPU if torch.cuda.is_available() else ON_CPU:
        options += common
        print(f"== {script} {' '.join(options)}", flush=True)
        if subprocess.run([sys.executable, str(here / script), *options]).returncode != 0:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
