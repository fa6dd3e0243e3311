"""Checks sums over ranks on GPUs, a process for each: `python tests/parallel/check_sums.py --ranks 2`.

Prints, as its last line, JSON: for each check, what every rank found wrong; empty lists if all is right.
Standard error has full tracebacks.
"""

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.layers.norm import RMSNorm
from octavo.parallel import TensorParallel
from octavo.parallel.all_reduce import choose_algorithm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = tuple(2**power for power in range(11, 26))
# Not multiples of what a thread, a program or a rank has.
ODD_SIZES = (2, 34, 2050, 4098, 65542, 1048590, 6291462)
NUM_REPLAYS = 10_000
HIDDEN = 4096


def parts_of(shape: tuple[int, ...], dtype: torch.dtype, size: int, seed: int) -> list[Tensor]:
    """Every rank's part: the same on all ranks."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(size)]


def in_order(parts: list[Tensor]) -> Tensor:
    """Their sum in float32, in the order of ranks."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def differs(name: str, found: Tensor, expected: Tensor, *, exact: bool) -> list[str]:
    """What is wrong with a tensor, if anything."""
    if torch.equal(found, expected):
        return []
    error = (found.float() - expected.float()).abs().max().item()
    bound = 0.0 if exact else 0.02 * expected.float().abs().max().item()
    return [f"{name}: off by {error:.3g}"] if not error <= bound else []


def check_sizes(parallel: TensorParallel) -> list[str]:
    """Sums of all sizes, against sums in float32."""
    wrong = []
    for dtype in DTYPES:
        for number, num_bytes in enumerate((*SIZES, *ODD_SIZES)):
            num_values = -(-num_bytes // dtype.itemsize)
            parts = parts_of((num_values,), dtype, parallel.size, number)
            found = parallel.all_reduce(parts[parallel.rank].clone())
            exact = choose_algorithm(num_values * dtype.itemsize, parallel.size) != "nccl"
            wrong += differs(f"{dtype}, {num_bytes} bytes", found, in_order(parts), exact=exact)
    return wrong


def check_norm(parallel: TensorParallel) -> list[str]:
    """The sum with residual and norm, against single steps."""
    wrong = []
    for dtype in DTYPES:
        for rows, hidden in ((1, 4096), (3, 4096), (8, 1000), (40, 5120), (300, 1024), (1, 64)):
            parts = parts_of((rows, hidden), dtype, parallel.size, rows)
            (residual,) = parts_of((rows, hidden), dtype, 1, hidden)
            weight = torch.linspace(0.5, 1.5, hidden, device="cuda", dtype=dtype)
            summed = residual.clone()
            found = RMSNorm(weight, 1e-6, parallel)(summed, parts[parallel.rank].clone())
            expected = RMSNorm(weight, 1e-6)(residual, in_order(parts))
            name = f"{dtype}, {rows} x {hidden}"
            wrong += differs(f"{name}, residual", summed, residual, exact=True)
            wrong += differs(f"{name}, norm", found, expected, exact=False)
    return wrong


def check_equal_bits(parallel: TensorParallel) -> list[str]:
    """All ranks' results, gathered."""
    wrong = []
    for num_bytes in SIZES:
        parts = parts_of((num_bytes // 2,), torch.bfloat16, parallel.size, num_bytes)
        found = parallel.all_reduce(parts[parallel.rank].clone())
        gathered = parallel.all_gather_last_dim(found[None]).view(parallel.size, -1)
        if not all(torch.equal(row, gathered[0]) for row in gathered):
            wrong.append(f"{num_bytes} bytes: ranks have other bits")
    return wrong


def check_order(parallel: TensorParallel) -> list[str]:
    """Sums of deterministic engines: exact at any size, also beyond those that are left to NCCL otherwise."""
    group: Any = parallel.group
    wrong = []
    group._in_order = True
    for number, num_bytes in enumerate((2048, 2**24, 2**24 + 1024, 3 * 2**24 + 34)):
        parts = parts_of((num_bytes // 2,), torch.bfloat16, parallel.size, number)
        found = parallel.all_reduce(parts[parallel.rank].clone())
        wrong += differs(f"in order, {num_bytes} bytes", found, in_order(parts), exact=True)
    group._in_order = False
    return wrong


def check_replays(parallel: TensorParallel) -> list[str]:
    """Two graphs of an odd and an even number of sums, replayed in turn while one rank is often late."""
    errors = torch.zeros((), dtype=torch.int64, device="cuda")
    sizes = (4096, 3 * 4096, 64 * 4096, 2**22, 300)
    parts = {size: parts_of((size,), torch.bfloat16, parallel.size, size) for size in sizes}
    sums = {size: in_order(parts[size]) for size in sizes}
    weight = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    norm = RMSNorm(weight, 1e-6, parallel)

    def run(chosen: tuple[int, ...]) -> None:
        for size in chosen:
            found = parallel.all_reduce(parts[size][parallel.rank].clone())
            errors.add_((found != sums[size]).sum())
            if size % HIDDEN == 0 and size < 2**20:
                residual = torch.zeros(size // HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16)
                norm(residual, parts[size][parallel.rank].view(-1, HIDDEN).clone())
                errors.add_((residual.view(-1) != sums[size]).sum())

    graphs = [capture(partial(run, sizes)), capture(partial(run, (300, 4096, 2**22)))]
    errors.zero_()
    for number in range(NUM_REPLAYS):
        if number % 7 == 0 and parallel.rank == number % parallel.size:
            torch.cuda._sleep(200_000)
        graphs[number % 3 == 1].replay()
    torch.cuda.synchronize()
    return [f"{errors.item()} wrong values"] if errors.item() else []


def capture(run: partial[None]) -> torch.cuda.CUDAGraph:
    """A graph of what a function launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def check_lost_rank(parallel: TensorParallel) -> list[str]:
    """The last rank never comes: once the others give up, their kernels end."""
    if parallel.rank == parallel.size - 1:
        return []
    tensor = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    threading.Timer(1.0, parallel.abort).start()
    begun = time.monotonic()
    for _ in range(50):
        tensor = parallel.all_reduce(tensor)
    torch.cuda.synchronize()
    took_s = time.monotonic() - begun
    return [] if 0.5 < took_s < 5 else [f"it took {took_s:.2f} s"]


CHECKS = (check_sizes, check_norm, check_equal_bits, check_order, check_replays, check_lost_rank)


def be_rank(rank: int, size: int, folder: Path) -> None:
    """Run all checks in one rank's process."""
    from octavo.parallel.nccl import connect_nccl

    faulthandler.dump_traceback_later(80, exit=True)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    parallel = connect_nccl(rank, size, device, folder / "rendezvous")
    found = {"way": [parallel.describe()]}
    for check in CHECKS:
        begun = time.monotonic()
        try:
            found[check.__name__] = check(parallel)
        except Exception:
            found[check.__name__] = [traceback.format_exc()]
            traceback.print_exc()
        took_s = time.monotonic() - begun
        print(f"rank {rank}: {check.__name__} in {took_s:.1f} s: {found[check.__name__]}", file=sys.stderr)
        (folder / f"found{rank}.json").write_text(json.dumps(found))
    # Collectives that were broken off may keep threads.
    os._exit(0)


def main() -> None:
    """Start a process for each rank, and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        be_rank(arguments.rank, arguments.ranks, arguments.folder)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--ranks", str(arguments.ranks), "--folder", folder]
        processes = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(arguments.ranks)]
        codes = [process.wait() for process in processes]
        files = [Path(folder, f"found{rank}.json") for rank in range(arguments.ranks)]
        found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    names = ["way", *(check.__name__ for check in CHECKS)]
    lost = [f"it ended, codes {codes}"]
    print(json.dumps({name: [rank.get(name, lost) for rank in found] for name in names}))


if __name__ == "__main__":
    main()
