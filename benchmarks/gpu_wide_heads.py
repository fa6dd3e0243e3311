"""Attention with heads of 256 and 512 on one NVIDIA GPU: the tilings in use, and others beside them.

    python benchmarks/gpu_wide_heads.py [--only "decode 32/4x512"] [--kv-cache-dtype fp8] [--tilings]
                                        [--save MACHINE]

The shapes are those of Gemma 4: full layers of 31B (32 query heads on 4 kv heads of 512) and of 26B-A4B (16
on 2), and their windowed layers (32 on 16 and 16 on 8 of 256). Each time is the median over replays of a CUDA
graph of several calls; calls take turns at copies of the cache, so that no L2 cache holds what they read. The
bound is the larger of bytes over the measured copy rate and operations over the measured matrix rate. Prints
a table, then one line of JSON.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from gpu_attention import Batch, Workload, make_batch, relative_error, to_float8
from support.common import make_parser, publish, table
from support.gpu_timing import copy_rate, graph_seconds, matrix_rate
from triton.runtime.errors import OutOfResources

from octavo.attention.cache import FLOAT8
from octavo.attention.gpu_paged import attend_with_map
from octavo.attention.implementations import unsupported_reason
from octavo.attention.score_options import ScoreOptions
from octavo.attention.tilings.portable import TileShape
from octavo.attention.triton.step_map import make_step_map
from octavo.kernels.device import nvidia_generation

# Keys and values that calls take turns at are larger together than any L2 cache.
_CACHE_BYTES = 256 << 20
_BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, kv heads, their size and the window of a model's layers."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def name(self) -> str:
        window = "" if self.window is None else f" window {self.window}"
        return f"{self.heads}/{self.kv_heads}x{self.head_dim}{window}"


LAYERS = (Heads(32, 4, 512), Heads(16, 2, 512), Heads(32, 16, 256, 1024), Heads(16, 8, 256, 1024))
# Sequences, query tokens of each, tokens in the cache with them.
STEPS = (
    *((batch, 1, context) for batch in (1, 32, 256) for context in (4096, 32768)),
    (1, 8192, 8192),
    (8, 512, 8704),
)
DECODE_TILES = (
    *(TileShape(16, 16, 4, stages, 2) for stages in (2, 3, 4)),
    *(TileShape(16, 32, 4, stages, 1) for stages in (2, 3)),
    *(TileShape(16, 32, 4, stages, 2) for stages in (2, 3, 4)),
    TileShape(16, 16, 8, 3, 2, 128),
    *(TileShape(16, 32, 8, stages, 1) for stages in (2, 3)),
    TileShape(16, 64, 8, 2, 1),
    TileShape(16, 64, 4, 3, 2),
)
# Of one warp, for Hopper's kernel, by head dimension.
WARP_TILES = {
    256: (
        TileShape(16, 16, 1, 3, 4, 255),
        TileShape(16, 16, 1, 2, 6, 255),
        TileShape(16, 16, 1, 4, 3, 255),
        TileShape(16, 32, 1, 2, 3, 255),
        TileShape(16, 32, 1, 3, 2, 255),
    ),
    512: (
        TileShape(8, 16, 1, 3, 2, 255),
        TileShape(8, 16, 1, 2, 3, 255),
        TileShape(8, 16, 1, 4, 1, 255),
        TileShape(8, 32, 1, 3, 1, 255),
    ),
}
PROMPT_TILES = (
    TileShape(64, 32, 8, 2, 1),
    TileShape(64, 16, 8, 3, 1),
    TileShape(64, 64, 8, 1, 1),
    TileShape(32, 32, 4, 2, 2),
    TileShape(64, 32, 4, 2, 2),
    TileShape(64, 64, 4, 2, 1),
    TileShape(128, 32, 8, 2, 1),
    TileShape(128, 64, 8, 2, 1),
)


def visible_tokens(workload: Workload, window: int | None) -> int:
    """Return how many of a sequence's keys some query token sees."""
    if window is None:
        return workload.seq_len
    return min(workload.seq_len, window + workload.query_len - 1)


def bound_seconds(batch: Batch, window: int | None, rates: dict[str, float]) -> float:
    """Return the larger of the time to read keys and values and that of both products."""
    workload = batch.workload
    num_keys = visible_tokens(workload, window)
    kv_bytes = 2 * workload.batch * num_keys * workload.kv_heads * workload.head_dim * batch.cache.k.itemsize
    pairs = sum(
        min(workload.seq_len - workload.query_len + i + 1, window or workload.seq_len)
        for i in range(workload.query_len)
    )
    flops = 4 * workload.heads * workload.head_dim * workload.batch * pairs
    return max(kv_bytes / rates["copy_tb_per_s"], flops / rates["matrix_tflops"]) / 1e12


def make_copies(workload: Workload, dtype: torch.dtype) -> list[Batch]:
    """Return a batch, and others with keys in other memory if the first ones could stay in a cache."""
    first = make_batch(workload, _BLOCK_SIZE)
    if dtype == FLOAT8:
        first = to_float8(first)
    num_copies = min(16, max(1, _CACHE_BYTES // first.kv_bytes)) if workload.query_len == 1 else 1
    copies = [first]
    for _ in range(num_copies - 1):
        k, v = (x.transpose(1, 2).clone().transpose(1, 2) for x in (first.cache.k, first.cache.v))
        copies.append(replace(first, cache=replace(first.cache, k=k, v=v)))
    return copies


def tiles(batch: Batch, *, sweeps: bool) -> Iterator[tuple[str, TileShape | None]]:
    """Yield the tiling in use, as None, and with `sweeps` others that could be."""
    yield "in use", None
    if sweeps:
        decode_tiles = DECODE_TILES
        if nvidia_generation(batch.q.device) == 9 and batch.cache.k.dtype != FLOAT8:
            decode_tiles = (*WARP_TILES[batch.workload.head_dim], *decode_tiles)
        for tile in decode_tiles if batch.workload.query_len == 1 else PROMPT_TILES:
            yield (
                f"{tile.rows}x{tile.keys}, {tile.num_warps} warps, {tile.num_stages} stages, "
                f"{tile.programs_per_multiprocessor} programs",
                tile,
            )


def measure(
    copies: list[Batch], window: int | None, tile: TileShape | None, rates: dict[str, float]
) -> dict[str, float | str]:
    """Time a tiling, None: that in use, and check it where there is no window."""
    batch, workload = copies[0], copies[0].workload
    decodes = workload.query_len == 1
    options = ScoreOptions(workload.head_dim**-0.5, window)
    step_map = make_step_map(
        batch.metadata, num_tokens=batch.q.shape[0], num_heads=workload.heads,
        num_kv_heads=workload.kv_heads, head_dim=workload.head_dim, dtype=batch.q.dtype,
        cache_dtype=batch.cache.k.dtype, block_size=_BLOCK_SIZE, window=window,
        decode=tile if decodes else None, prefill=None if decodes else tile,
    )  # fmt: skip
    turns = [0]

    def attend() -> torch.Tensor:
        turns[0] += 1
        chosen = copies[turns[0] % len(copies)]
        return attend_with_map(batch.q, chosen.cache, batch.metadata, options, step_map)[0]

    error = relative_error(batch, attend()) if window is None else float("nan")
    seconds = graph_seconds(attend, num_calls=max(4, min(16, len(copies))))
    bound = bound_seconds(batch, window, rates)
    return {
        "us": round(seconds * 1e6, 1),
        "bound_us": round(bound * 1e6, 1),
        "of_bound": round(bound / seconds, 3),
        "error": f"{error:.0e}",
    }


def fits(workload: Workload, dtype: torch.dtype) -> bool:
    """Return whether half of the free memory holds the workload's keys and values, and what makes them."""
    num_numbers = 2 * workload.batch * workload.seq_len * workload.kv_heads * workload.head_dim
    factor = 2 if dtype == torch.bfloat16 else 3
    return num_numbers * factor < 0.9 * torch.cuda.mem_get_info()[0]


def workloads(only: str) -> Iterator[tuple[Heads, Workload]]:
    """Yield the steps of all layers whose names contain `only`."""
    for heads in LAYERS:
        for batch, query_len, seq_len in STEPS:
            kind = "decode" if query_len == 1 else "prompts" if query_len == seq_len else "extend"
            name = f"{kind} {heads.name}: {batch} x {query_len} of {seq_len}"
            if only in name:
                yield (
                    heads,
                    Workload(name, batch, query_len, seq_len, heads.heads, heads.kv_heads, heads.head_dim),
                )


def main() -> None:
    """Measure the steps and print the table and the JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", help="run the steps whose names contain this")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--tilings", action="store_true", help="time other tilings, too")
    arguments = parser.parse_args()
    dtype = FLOAT8 if arguments.kv_cache_dtype == "fp8" else torch.bfloat16
    assert unsupported_reason("triton", "cuda", dtype) is None
    rates = {"copy_tb_per_s": copy_rate() / 1e12, "matrix_tflops": matrix_rate() / 1e12}
    rows, results = [], []
    for heads, workload in workloads(arguments.only):
        if not fits(workload, dtype):
            print(f"{workload.name}: too large for this GPU's memory", flush=True)
            continue
        copies = make_copies(workload, dtype)
        for name, tile in tiles(copies[0], sweeps=arguments.tilings):
            try:
                figures = measure(copies, heads.window, tile, rates)
            except OutOfResources as error:
                print(f"{workload.name}: {name}: {error}", flush=True)
                continue
            rows.append([workload.name, name, *figures.values()])
            results.append({"workload": workload.name, "tiling": name, **figures})
            print(rows[-1], flush=True)
        del copies
    print(table(["workload", "tiling", "us", "bound us", "of bound", "error"], rows))
    publish("gpu_wide_heads", {**rates, "results": results}, arguments)


if __name__ == "__main__":
    main()
