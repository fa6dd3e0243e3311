"""What two or more NVIDIA GPUs of one host bring to one model, and what their sums over ranks cost.

Times sums of bfloat16 tensors in a CUDA graph, microseconds each: by NCCL as the engine calls it, and by
PyTorch's symmetric memory. Then prints tokens per second of Qwen3 shapes on one GPU and on several; compare
benchmarks/tensor_parallel_model.py. The last line is JSON. Needs as many GPUs as ranks.

    python benchmarks/gpu_tensor_parallel.py [--model 8b] [--ranks 2] [--save MACHINE]
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.common import make_parser, publish, table
from support.gpu_bound import SHAPES
from support.gpu_model import load, run
from support.gpu_timing import graph_seconds
from support.gpu_workloads import WORKLOADS

_WORKLOADS = ("single", "mid", "shared")
_SUM_BYTES = tuple(2**power for power in range(11, 25))


def main() -> None:
    """Run everything."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="8b")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    if torch.cuda.device_count() < arguments.ranks:
        raise SystemExit(f"{arguments.ranks} GPUs are needed, torch sees {torch.cuda.device_count()}")
    sums = measure_sums(arguments.ranks)
    print(table(list(sums[0]), [list(row.values()) for row in sums]))
    served = serve(arguments)
    print(table(list(served[0]), [list(row.values()) for row in served]))
    report: dict[str, object] = {"model": arguments.model, "ranks": arguments.ranks}
    publish("gpu_tensor_parallel", {**report, "sums": sums, "workloads": served}, arguments)


def serve(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Run each workload three times on one GPU, then on several; tokens/s of the better of the last two."""
    rates: dict[int, list[float]] = {}
    for num_ranks in (1, arguments.ranks):
        llm = load(arguments.model, tensor_parallel_size=num_ranks)
        workloads = [WORKLOADS[name]() for name in _WORKLOADS]
        rates[num_ranks] = [
            workload.rate(min([run(llm, workload) for _ in range(3)][1:])) for workload in workloads
        ]
        llm.engine.close()
        del llm
        torch.cuda.empty_cache()
    return [
        {
            "workload": name,
            "1 GPU tokens/s": round(one, 1),
            f"{arguments.ranks} GPUs tokens/s": round(several, 1),
            "ratio": round(several / one, 3),
        }
        for name, one, several in zip(_WORKLOADS, *rates.values(), strict=True)
    ]


def measure_sums(num_ranks: int) -> list[dict[str, object]]:
    """Time sums in one process for each rank; rank 0 tells."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_measure_rank, (num_ranks, folder), nprocs=num_ranks)  # type: ignore[attr-defined]
        return torch.load(Path(folder, "sums.pt"), weights_only=True)


def _measure_rank(rank: int, num_ranks: int, folder: str) -> None:
    """Be one rank: every rank makes the same calls."""
    from torch import distributed

    from octavo.parallel.nccl import connect_nccl

    api: Any = distributed
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    parallel = connect_nccl(rank, num_ranks, device, Path(folder, "rendezvous"))
    api.init_process_group(
        "nccl",
        store=api.FileStore(str(Path(folder, "symmetric")), num_ranks),
        rank=rank,
        world_size=num_ranks,
    )
    rows: list[dict[str, object]] = []
    for num_bytes in _SUM_BYTES:
        tensor = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
        calls = {"NCCL us": partial(parallel.all_reduce, tensor), **_symmetric_sums(num_bytes, device)}
        times = {name: round(graph_seconds(call) * 1e6, 2) for name, call in calls.items()}
        rows.append({"bytes": num_bytes, **times})
    if rank == 0:
        torch.save(rows, Path(folder, "sums.pt"))
    api.destroy_process_group()


def _symmetric_sums(num_bytes: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """PyTorch's own sums over memory that all GPUs map; no multicast."""
    import torch.distributed._symmetric_memory as symmetric
    from torch import distributed

    api: Any = distributed
    memory = symmetric.empty(num_bytes // 2, dtype=torch.bfloat16, device=device)
    name = api.group.WORLD.group_name
    symmetric.rendezvous(memory, name)
    operators: Any = torch.ops.symm_mem
    return {
        "one-shot us": lambda: operators.one_shot_all_reduce(memory, "sum", name),
        "two-shot us": lambda: operators.two_shot_all_reduce_(memory, "sum", name),
    }


if __name__ == "__main__":
    main()
