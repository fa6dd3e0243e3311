"""`octavo bench prefix`: how much faster attention is when shared prefixes are read once."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octavo.attention import AttentionMetadata, DeviceForest, ForestPlan, KVCache, paged_attention
from octavo.attention.implementations import choose_impl
from octavo.cli.bench.rounds import MAX_TRIES, compare, timer
from octavo.cli.options import PrefixBenchOptions, check_plot
from octavo.engine.memory.devices import device_of
from octavo.errors import ConfigError, OctavoError
from octavo.parallel import TensorParallel

NUM_STEPS = 9
# One round over the layers reads at least this many bytes, so that no layer finds its keys in a cache.
_ROUND_BYTES = {"cpu": 256 << 20, "cuda": 512 << 20}
_MAX_LAYERS = 16


@dataclass(frozen=True, slots=True)
class Sweep:
    """PrefixBenchOptions with every "auto" and None replaced by a value for this machine."""

    context_len: int
    batch_sizes: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def decide(cls, options: PrefixBenchOptions) -> "Sweep":
        """Choose values for this machine.

        Raises:
            ConfigError: there is no such device, or the context is shorter than two blocks.
        """
        device = device_of(options.device, TensorParallel())
        on_gpu = device.type == "cuda"
        block_size = options.block_size or (64 if on_gpu else 16)
        context_len = options.context_len or (4096 if on_gpu else 1024)
        default_dtype = "bfloat16" if on_gpu else "float32"
        if context_len < 2 * block_size:
            raise ConfigError(
                f"context_len must be at least two blocks of {block_size} tokens, got {context_len}"
            )
        return cls(
            context_len=context_len // block_size * block_size,
            batch_sizes=options.batch_sizes or ((1, 8, 64, 256, 512) if on_gpu else (1, 4, 16)),
            num_heads=options.num_heads,
            num_kv_heads=options.num_kv_heads,
            head_dim=options.head_dim,
            block_size=block_size,
            dtype=getattr(torch, default_dtype if options.dtype == "auto" else options.dtype),
            device=device,
        )

    @property
    def impl(self) -> str:
        """The attention implementation that runs."""
        return choose_impl("auto", self.device.type, self.dtype)

    @property
    def shared_lens(self) -> list[int]:
        """Shared tokens at each point: whole blocks, always leaving one block to each sequence."""
        num_blocks = self.context_len // self.block_size
        steps = [round(num_blocks * step / (NUM_STEPS - 1)) for step in range(NUM_STEPS)]
        return sorted({min(step, num_blocks - 1) * self.block_size for step in steps})

    def num_distinct_tokens(self, batch_size: int, shared_len: int) -> int:
        """Return the tokens in the cache, with shared ones counted once."""
        return shared_len + batch_size * (self.context_len - shared_len)

    def layer_numbers(self, num_tokens: int) -> int:
        """Return how many numbers the keys and values of `num_tokens` take in one layer."""
        return 2 * num_tokens * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Point:
    """Attention of one decode step in one layer: flat reads each sequence, forest reads shared blocks once.

    Attributes:
        batch_size: sequences, one query token each.
        shared_len: leading tokens of context_len that all sequences share.
        flat_us, forest_us: median microseconds of the rounds.
        speedup: median of flat / forest over the rounds; None if they differ too much for a median to mean
            anything, also when all of them were run again.
        speedup_quartiles: those of the rounds.
        num_tries: how often the rounds were run.
        bytes_ratio: keys and values that flat reads, over distinct ones: the speed-up if only bytes counted.
        max_difference: largest absolute difference between both results.
    """

    batch_size: int
    shared_len: int
    flat_us: float
    forest_us: float
    speedup: float | None
    speedup_quartiles: tuple[float, float]
    num_tries: int
    bytes_ratio: float
    max_difference: float


def run_prefix_bench(options: PrefixBenchOptions) -> None:
    """Run the sweep; print a table, draw the plot if one is wanted, print a JSON line.

    Raises:
        OctavoError: the times of every point were noise; they are printed all the same.
    """
    sweep = Sweep.decide(options)
    if options.plot is not None:
        check_plot(Path(options.plot))
    points = [point for batch_size in sweep.batch_sizes for point in measure(sweep, batch_size)]
    _print_table(sweep, points)
    if options.plot is not None:
        plot(sweep, points, Path(options.plot))
    print(json.dumps({**_describe(sweep), "points": [asdict(point) for point in points]}))
    _tell_noise(points)


def _tell_noise(points: list[Point]) -> None:
    noise = sum(point.speedup is None for point in points)
    warning = (
        f"the times of {noise} of {len(points)} points differ too much from round to round, "
        f"{MAX_TRIES} times over: end what else runs on this machine"
    )
    if noise == len(points):
        raise OctavoError(warning)
    if noise:
        print(f"octavo: warning: {warning}", file=sys.stderr)


@torch.inference_mode()
def measure(sweep: Sweep, batch_size: int) -> Iterator[Point]:
    """Measure each point of the sweep for one batch size."""
    most = sweep.layer_numbers(sweep.num_distinct_tokens(batch_size, 0))
    num_numbers = max(_ROUND_BYTES[sweep.device.type] // sweep.dtype.itemsize, 2 * most)
    numbers = torch.empty(num_numbers, dtype=sweep.dtype, device=sweep.device).normal_()
    q = torch.randn(batch_size, sweep.num_heads, sweep.head_dim, device=sweep.device).to(sweep.dtype)
    for shared_len in sweep.shared_lens:
        yield _measure_point(sweep, q, numbers, shared_len)


def _measure_point(sweep: Sweep, q: Tensor, numbers: Tensor, shared_len: int) -> Point:
    batch_size = q.shape[0]
    num_tokens = sweep.num_distinct_tokens(batch_size, shared_len)
    cache = _layers(sweep, numbers, num_tokens)
    flat, forest = _metadata(sweep, make_block_tables(sweep, batch_size, shared_len))

    def attend(metadata: AttentionMetadata, layer: int) -> Tensor:
        return paged_attention(q, cache.layer(layer), metadata, scale=sweep.head_dim**-0.5)

    num_layers = cache.data.shape[0]

    def timed(metadata: AttentionMetadata) -> Callable[[], float]:
        def all_layers() -> None:
            for layer in range(num_layers):
                attend(metadata, layer)

        return timer(all_layers, sweep.device)

    difference = (attend(flat, 0).float() - attend(forest, 0).float()).abs().max().item()
    found = compare(timed(flat), timed(forest))
    return Point(
        batch_size=batch_size,
        shared_len=shared_len,
        flat_us=found.first_s / num_layers * 1e6,
        forest_us=found.second_s / num_layers * 1e6,
        speedup=None if found.is_noise else found.ratio,
        speedup_quartiles=(found.low, found.high),
        num_tries=found.num_tries,
        bytes_ratio=batch_size * sweep.context_len / num_tokens,
        max_difference=difference,
    )


def _layers(sweep: Sweep, numbers: Tensor, num_tokens: int) -> KVCache:
    """View random numbers as the KV caches of as many layers as fit, at most _MAX_LAYERS."""
    size = sweep.layer_numbers(num_tokens)
    num_layers = min(_MAX_LAYERS, numbers.shape[0] // size)
    num_blocks = num_tokens // sweep.block_size
    shape = (num_layers, 2, num_blocks, sweep.num_kv_heads, sweep.block_size, sweep.head_dim)
    return KVCache(numbers[: num_layers * size].view(shape))


def make_block_tables(sweep: Sweep, batch_size: int, shared_len: int) -> np.ndarray:
    """Return shuffled block ids [S, blocks] int32: shared ones first in every row, then each row's own."""
    num_shared = shared_len // sweep.block_size
    num_own = sweep.context_len // sweep.block_size - num_shared
    ids = np.random.default_rng(0).permutation(num_shared + batch_size * num_own).astype(np.int32)
    own = ids[num_shared:].reshape(batch_size, num_own)
    return np.concatenate([np.tile(ids[:num_shared], (batch_size, 1)), own], axis=1)


def _metadata(sweep: Sweep, block_tables: np.ndarray) -> tuple[AttentionMetadata, AttentionMetadata]:
    """Return a decode step's metadata without and with sharing; all layers use the same."""
    batch_size, device = block_tables.shape[0], sweep.device
    seq_lens = np.full(batch_size, sweep.context_len, dtype=np.int32)
    cu_seqlens_q = np.arange(batch_size + 1, dtype=np.int32)
    plain = AttentionMetadata(
        cu_seqlens_q=torch.from_numpy(cu_seqlens_q).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        positions=torch.from_numpy(seq_lens - 1).to(device),
        slot_mapping=torch.full((batch_size,), -1, device=device),
        block_table=torch.from_numpy(block_tables).to(device),
        max_query_len=1,
        max_seq_len=sweep.context_len,
    )
    step = (block_tables, seq_lens, cu_seqlens_q, sweep.block_size)
    if sweep.impl != "triton":
        flat = replace(plain, work=ForestPlan.flat(seq_lens, cu_seqlens_q))
        return flat, replace(plain, work=ForestPlan.from_block_tables(*step))
    forest = DeviceForest(
        max_num_seqs=batch_size,
        num_heads=sweep.num_heads,
        num_kv_heads=sweep.num_kv_heads,
        head_dim=sweep.head_dim,
        block_size=sweep.block_size,
        dtype=sweep.dtype,
        device=device,
    )
    plan = forest.plan(block_tables, seq_lens, cu_seqlens_q)
    forest.upload(plan)
    return plain, replace(plain, work=forest if plan.num_units else None)


def _describe(sweep: Sweep) -> dict[str, object]:
    name = (
        torch.cuda.get_device_name() if sweep.device.type == "cuda" else f"{torch.get_num_threads()} threads"
    )
    texts = {"dtype": str(sweep.dtype).removeprefix("torch."), "device": str(sweep.device)}
    return {**asdict(sweep), **texts, "device_name": name, "impl": sweep.impl}


def _title(sweep: Sweep) -> str:
    described = _describe(sweep)
    return (
        f"decode attention, {sweep.context_len} tokens of context, "
        f"{sweep.num_heads}/{sweep.num_kv_heads} heads of {sweep.head_dim}, "
        f"{described['dtype']}, {described['impl']} on {described['device_name']}"
    )


def _print_table(sweep: Sweep, points: list[Point]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"speed-up of shared blocks read once: median (quartiles)\n{_title(sweep)}"
    table = Table("context in common", *(f"batch {size}" for size in sweep.batch_sizes), title=title)
    for shared_len in sweep.shared_lens:
        row = [point for point in points if point.shared_len == shared_len]
        table.add_row(f"{shared_len / sweep.context_len:.1%}", *map(_cell, row))
    Console().print(table)


def _cell(point: Point) -> str:
    low, high = point.speedup_quartiles
    if point.speedup is None:
        return f"noise ({low:.2f}-{high:.2f})"
    return f"{point.speedup:.2f}x ({low:.2f}-{high:.2f})\n{point.forest_us:.0f} us"


def plot(sweep: Sweep, points: list[Point], path: Path) -> None:
    """Draw one curve of the speed-up per batch size, with its quartiles; noise is left out."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for batch_size in sweep.batch_sizes:
        curve = [point for point in points if point.batch_size == batch_size and point.speedup]
        shares = [100 * point.shared_len / sweep.context_len for point in curve]
        speedups = [point.speedup or 0.0 for point in curve]
        (line,) = axes.plot(shares, speedups, marker="o", label=f"batch {batch_size}")
        lows, highs = ([point.speedup_quartiles[side] for point in curve] for side in (0, 1))
        axes.vlines(shares, lows, highs, color=line.get_color())
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("context in common, %")
    axes.set_ylabel("speed-up over reading each sequence by itself")
    axes.set_title(_title(sweep), fontsize=9)
    axes.legend()
    figure.savefig(path, dpi=150)
