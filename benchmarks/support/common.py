"""Code that benchmarks share: command line, CPU rates, description of the machine, result files, tables."""

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import torch

_ROOT = Path(__file__).parents[2]
RESULTS = _ROOT / "benchmarks" / "results"


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a command line parser with --save, which every script has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", metavar="MACHINE", help="keep the result under benchmarks/results")
    parser.add_argument("--commit", metavar="ID", help="of the files that run; default: what git says")
    return parser


def median_s(function: Callable[[], object], repeat: int = 9) -> float:
    """Median seconds of a call, after two warm-up calls."""
    return statistics.median(_seconds(function, repeat))


def least_s(function: Callable[[], object], repeat: int = 25) -> float:
    """Least seconds of a call, after two warm-up calls: for what a machine can do at best."""
    return min(_seconds(function, repeat))


def _seconds(function: Callable[[], object], repeat: int) -> list[float]:
    for _ in range(2):
        function()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return times


def read_bandwidth() -> float:
    """Bytes per second that the CPU reads: 512 MiB, for the largest number or a product with a vector."""
    matrix, vector = torch.randn(16384, 8192), torch.randn(8192)
    return matrix.nbytes / min(least_s(lambda: matrix @ vector), least_s(lambda: matrix.amax()))


def float32_flops() -> float:
    """Floating-point operations per second of a large float32 matrix product."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    return 2 * 2048**3 / least_s(lambda: a @ b, repeat=9)


def block_flops() -> float:
    """Operations per second of Octavo's products with weights in blocks of 4 bits, all in a core's cache."""
    from octavo.forms.blocks import BlockWeight
    from octavo.gemm.cpu.block_linear import BlockLinear, tiled

    rows, columns = 1024, 512
    scales = torch.ones(rows, columns // 32, dtype=torch.float16)
    quants = torch.zeros(rows, columns, dtype=torch.uint8)
    layer, x = BlockLinear(tiled([BlockWeight(4, quants, scales, None)])), torch.rand(256, columns)
    return 2 * rows * columns * len(x) / least_s(lambda: layer(x))


def wait_until_idle(limit_s: float = 60.0) -> float:
    """Wait until the machine is idle: a busy neighbour process makes OpenMP many times slower.

    Returns:
        The share of CPU time that other processes took during the last half second.
    """
    deadline = time.monotonic() + limit_s
    while True:
        load = _busy_share(0.5)
        if load < 0.05 or time.monotonic() > deadline:
            return load


def measure_apart(script: str, *arguments: str) -> dict[str, float]:
    """Run a script with arguments in a fresh process on an idle machine; return the JSON of its last line.

    Raises:
        SystemExit: the process failed.
    """
    load = wait_until_idle()
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr}")
    return {**json.loads(done.stdout.splitlines()[-1]), "load_before": load}


def _busy_share(seconds: float) -> float:
    def sample() -> tuple[int, int]:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        return sum(fields), fields[3] + fields[4]

    total_before, idle_before = sample()
    time.sleep(seconds)
    total, idle = sample()
    return 1 - (idle - idle_before) / max(1, total - total_before)


def commit(root: Path = _ROOT) -> str:
    """Short id of the commit checked out in a folder, with "-dirty" if octavo/ differs from it.

    Returns:
        "unknown" unless the folder is the top level of its repository: another one may enclose a copy.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=root).stdout.strip()

    top = git("rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() != root.resolve():
        return "unknown"
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if git("status", "--porcelain", "octavo") else "")


def package_folder() -> Path:
    """The folder of the octavo package that this process would import."""
    spec = find_spec("octavo")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def sources(package: Path) -> str:
    """First 16 hex digits of a SHA-256 over a package's sources: Python and C files, names and contents."""
    digest = hashlib.sha256()
    files = {file.relative_to(package).as_posix(): file for file in package.rglob("*.*")}
    for name in sorted(files):
        if files[name].suffix in (".py", ".c", ".h"):
            digest.update(name.encode() + b"\0" + hashlib.sha256(files[name].read_bytes()).digest())
    return digest.hexdigest()[:16]


def machine(commit_id: str) -> dict[str, object]:
    """Describe the machine, the versions and the sources that figures were measured on."""
    model = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "commit": commit_id,
        "sources": sources(package_folder()),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def save(name: str, result: dict[str, object], machine_name: str, commit_id: str) -> Path:
    """Write a result file: results/<date>-<machine>-<commit>-<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{date.today().isoformat()}-{machine_name}-{commit_id}-{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def publish(name: str, figures: dict[str, object], arguments: argparse.Namespace) -> None:
    """Print figures and the machine as one JSON line; with --save, keep them in a result file.

    Args:
        name: of the benchmark.
        figures: what was measured.
        arguments: of a parser by `make_parser`.
    """
    commit_id = arguments.commit or commit()
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    report: dict[str, object] = {"machine": {**machine(commit_id), **gpu}, **figures}
    if arguments.save:
        print("saved", save(name, report, arguments.save, commit_id))
    print(json.dumps(report))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def figures_table(figures: Mapping[str, object]) -> str:
    """Format named figures as a table of two columns, numbers to four digits."""
    rows = [[name, f"{v:.4g}" if isinstance(v, float) else v] for name, v in figures.items()]
    return table(["figure", "value"], rows)


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad prompts on the left to one width: ([S, width] int64 ids, [S, width] int64 mask, 0 for padding)."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask
