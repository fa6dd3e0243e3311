"""What two or more NVIDIA GPUs of one host bring to one model, and what their sums over ranks cost.

    sums     microseconds of a bfloat16 sum over ranks, in a CUDA graph: by the engine's own kernels, one
             shot, two shots, and one shot with residual sum and norm; by NCCL, with and without a norm after
             it; and by PyTorch's symmetric memory. Medians, then 99th percentiles.
    serve    tokens per second of Qwen3 shapes beside the bound of so many GPUs, first and best run

Compare benchmarks/tensor_parallel_model.py. The last line is JSON. Needs as many GPUs as ranks.

    python benchmarks/gpu_tensor_parallel.py [--pieces sums,serve] [--model 8b] [--ranks 2] [--gpus 1,2]
        [--workloads single,mid,shared] [--runs 3] [--all-reduce auto] [--peer vllm] [--save MACHINE]
"""

import argparse
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers.vllm_serving import measure_in_child
from support.common import make_parser, publish, table
from support.gpu_bound import SHAPES, bound_s
from support.gpu_model import load, run
from support.gpu_timing import copy_bandwidth, graph_samples, matrix_flops
from support.gpu_workloads import WORKLOADS, run_figures

from octavo.layers.norm import RMSNorm
from octavo.parallel.all_reduce import choose_algorithm
from octavo.parallel.handle import TensorParallel

_SUM_BYTES = tuple(2**power for power in range(11, 25))
_HIDDEN = 4096
_NUM_REPLAYS = 60

Figures = dict[str, Any]
Call = Callable[[], object]


def main() -> None:
    """Run the pieces that are asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--pieces", default="sums,serve")
    parser.add_argument("--model", choices=SHAPES, default="8b")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs that sum")
    parser.add_argument("--gpus", default="1,2", help="numbers of GPUs that serve, one after the other")
    parser.add_argument("--workloads", default="single,mid,shared")
    parser.add_argument("--runs", type=int, default=3, help="runs of a workload on an engine")
    parser.add_argument("--all-reduce", choices=["auto", "nccl"], default="auto")
    parser.add_argument("--peer", choices=["none", "vllm"], default="none")
    arguments = parser.parse_args()
    pieces, gpus = arguments.pieces.split(","), [int(number) for number in arguments.gpus.split(",")]
    needed = max(arguments.ranks if "sums" in pieces else 1, *(gpus if "serve" in pieces else [1]))
    if torch.cuda.device_count() < needed:
        raise SystemExit(f"{needed} GPUs are needed, torch sees {torch.cuda.device_count()}")
    report: Figures = {
        name: value for name, value in vars(arguments).items() if name not in ("save", "commit")
    }
    if "sums" in pieces:
        report["sums"] = measure_sums(arguments.ranks)
        print_sums(report["sums"])
    if "serve" in pieces:
        report["engines"] = serve(arguments, gpus)
    publish("gpu_tensor_parallel", report, arguments)


def serve(arguments: argparse.Namespace, gpus: list[int]) -> list[Figures]:
    """Run the workloads on one engine after the other, each on so many GPUs; print what is known so far."""
    names = arguments.workloads.split(",")
    bandwidth, flops = copy_bandwidth(), matrix_flops()
    torch.cuda.empty_cache()
    engines = []
    for num_gpus in gpus:
        vllm = None
        if arguments.peer == "vllm":  # before this process takes the GPUs' memory
            settings = {"model": arguments.model, "runs": arguments.runs, "workloads": names}
            vllm = measure_in_child("offline", {**settings, "tensor_parallel_size": num_gpus}, limit_s=420)
        figures = {**serve_on(num_gpus, names, arguments), "vllm": vllm}
        bounds = {
            name: WORKLOADS[name]().rate(
                bound_s(arguments.model, WORKLOADS[name](), num_gpus * bandwidth, num_gpus * flops, 2)
            )
            for name in names
        }
        engines.append({**figures, "bounds": bounds})
        print_engine(engines[-1])
    return engines


def serve_on(num_gpus: int, names: list[str], arguments: argparse.Namespace) -> Figures:
    """Start an engine, and run each workload some times."""
    begun = time.perf_counter()
    llm = load(arguments.model, tensor_parallel_size=num_gpus, all_reduce=arguments.all_reduce)
    ready_s = time.perf_counter() - begun
    print(f"{num_gpus} GPUs: ready in {ready_s:.1f} s, {llm.engine.plan.num_kv_tokens:,} tokens", flush=True)
    results = {}
    for name in names:
        workload = WORKLOADS[name]()
        results[name] = run_figures(workload, [run(llm, workload) for _ in range(arguments.runs)])
        print(name, [f"{seconds:.3f} s" for seconds in results[name]["seconds"]], flush=True)
    late_work = llm.stats.late_work
    llm.engine.close()
    del llm
    torch.cuda.empty_cache()
    return {"gpus": num_gpus, "ready_s": ready_s, "late_work": late_work, "results": results}


def print_engine(engine: Figures) -> None:
    """Print one engine's table."""
    print(f"\n{engine['gpus']} GPUs, ready in {engine['ready_s']:.1f} s, late work {engine['late_work']}\n")
    vllm = (engine.get("vllm") or {}).get("results", {})
    rows = [
        [
            name,
            f"{figures['rate']:.1f} ({figures['first_rate']:.1f})",
            f"{vllm[name]['rate']:.1f}" if name in vllm else "",
            f"{engine['bounds'][name]:.0f}",
            f"{figures['rate'] / engine['bounds'][name]:.1%}",
        ]
        for name, figures in engine["results"].items()
    ]
    print(table(["workload", "tokens/s, best (first)", "vLLM", "bound", "of the bound"], rows), flush=True)


def measure_sums(num_ranks: int) -> list[Figures]:
    """Time sums in one process for each rank; rank 0 tells."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_measure_rank, (num_ranks, folder), nprocs=num_ranks)  # type: ignore[attr-defined]
        return torch.load(Path(folder, "sums.pt"), weights_only=True)


def print_sums(rows: list[Figures]) -> None:
    """Print medians, then 99th percentiles."""
    names = list(rows[0]["us"])
    for kind in ("us", "p99_us"):
        print(f"\n{kind}\n")
        cells = [
            [row["bytes"], row["way"], *(f"{row[kind].get(name, 0):.2f}" for name in names)] for row in rows
        ]
        print(table(["bytes", "way", *names], cells), flush=True)


def _measure_rank(rank: int, num_ranks: int, folder: str) -> None:
    """Be one rank: every rank makes the same calls."""
    from octavo.parallel.nccl import connect_nccl

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    parallel = connect_nccl(rank, num_ranks, device, Path(folder, "rendezvous"))
    nccl = connect_nccl(rank, num_ranks, device, Path(folder, "nccl"), shares_memory=False)
    if rank == 0:
        print("sums:", parallel.describe(), flush=True)
    symmetric = _meet_symmetric(rank, num_ranks, folder)
    rows: list[Figures] = []
    for num_bytes in _SUM_BYTES:
        calls = {**_own_sums(num_bytes, parallel, device), **_nccl_sums(num_bytes, nccl, device)}
        if symmetric is not None:
            calls |= _symmetric_sums(num_bytes, device, symmetric)
        row: Figures = {
            "bytes": num_bytes,
            "way": choose_algorithm(num_bytes, num_ranks),
            "us": {},
            "p99_us": {},
        }
        for name, call in calls.items():
            samples = sorted(sample * 1e6 for sample in graph_samples(call, num_replays=_NUM_REPLAYS))
            row["us"][name] = statistics.median(samples)
            row["p99_us"][name] = samples[int(0.99 * len(samples))]
        rows.append(row)
    if rank == 0:
        torch.save(rows, Path(folder, "sums.pt"))


def _rows(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A part of a sum, a residual stream and the weight of a norm."""
    width = min(_HIDDEN, num_bytes // 2)
    shape = (num_bytes // 2 // width, width)
    part, residual = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    return part, residual, torch.ones(width, dtype=torch.bfloat16, device=device)


def _own_sums(num_bytes: int, parallel: TensorParallel, device: torch.device) -> dict[str, Call]:
    """The engine's kernels, whatever it would choose."""
    from octavo.parallel.triton.sum_norm import sum_rms_norm
    from octavo.parallel.triton.sums import sum_one_shot, sum_two_shot

    part, residual, weight = _rows(num_bytes, device)
    memory = parallel.memory_for(weight[:1])
    if memory is None:
        return {}
    calls: dict[str, Call] = {}
    if num_bytes <= memory.one_shot_bytes:
        calls["one-shot"] = partial(sum_one_shot, part, memory)
        calls["one-shot + norm"] = partial(sum_rms_norm, residual, part, weight, 1e-6, memory)
    return {**calls, "two-shot": partial(sum_two_shot, part, memory)}


def _nccl_sums(num_bytes: int, nccl: TensorParallel, device: torch.device) -> dict[str, Call]:
    """NCCL as the engine calls it, and with the engine's norm kernel after it."""
    part, residual, weight = _rows(num_bytes, device)
    norm = RMSNorm(weight, 1e-6, nccl)
    return {"NCCL": partial(nccl.all_reduce, part), "NCCL, norm": partial(norm, residual, part)}


def _meet_symmetric(rank: int, num_ranks: int, folder: str) -> str | None:
    """Make PyTorch's default group, which its symmetric memory needs; return its name, None if that fails."""
    from torch import distributed

    api: Any = distributed
    store = api.FileStore(str(Path(folder, "symmetric")), num_ranks)
    try:
        api.init_process_group("nccl", store=store, rank=rank, world_size=num_ranks)
        _symmetric_sums(2048, torch.device("cuda", rank), api.group.WORLD.group_name)
    except (RuntimeError, ImportError):
        traceback.print_exc()
        return None
    return api.group.WORLD.group_name


def _symmetric_sums(num_bytes: int, device: torch.device, name: str) -> dict[str, Call]:
    """PyTorch's own sums over memory that all GPUs map; no multicast."""
    from torch.distributed import _symmetric_memory

    symmetric: Any = _symmetric_memory
    memory = symmetric.empty(num_bytes // 2, dtype=torch.bfloat16, device=device).zero_()
    symmetric.rendezvous(memory, name)
    operators: Any = torch.ops.symm_mem
    return {
        "torch one-shot": lambda: operators.one_shot_all_reduce(memory, "sum", name),
        "torch two-shot": lambda: operators.two_shot_all_reduce_(memory, "sum", name),
    }


if __name__ == "__main__":
    main()
