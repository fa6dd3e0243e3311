"""Paged attention on this CPU: milliseconds of each implementation at each shape, beside the memory bound.

    python benchmarks/cpu_attention.py [--repeats 20] [--save MACHINE]

The bound of a shape is the KV bytes that its plan reads over the measured copy bandwidth (bytes read plus
bytes written). A fraction above 1 means that the CPU's caches still held blocks. Other processes distort
every number: run on an idle machine, and compare within one run. The last line is JSON.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from support.common import make_parser, median_s, publish

from octavo.attention import (
    AttentionMetadata,
    ForestPlan,
    KVCache,
    LayerCache,
    available_impls,
    paged_attention,
)

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """S sequences of seq_len tokens: the last query_len are new, the first `shared` are shared."""

    name: str
    num_sequences: int
    seq_len: int
    query_len: int
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    shared: int = 0
    forest: bool = False

    @property
    def flops(self) -> int:
        """Multiplications and additions of all visible (query, key) pairs."""
        keys = sum(range(self.seq_len - self.query_len + 1, self.seq_len + 1))
        return 4 * self.num_sequences * self.heads * self.head_dim * keys


SHAPES = (
    Shape("decode 64 x 200", 64, 200, 1),
    Shape("decode 1 x 1000", 1, 1000, 1),
    Shape("decode 32 x 500, 8/8 x 128", 32, 500, 1, 8, 8, 128),
    Shape("decode 32 x 1000, 32/4 x 128", 32, 1000, 1, 32, 4, 128),
    Shape("32 x (512 shared + 64), flat", 32, 576, 1, shared=512),
    Shape("32 x (512 shared + 64), forest", 32, 576, 1, shared=512, forest=True),
    Shape("prefill 1 x 512", 1, 512, 512),
    Shape("prefill 8 x 128", 8, 128, 128),
    Shape("prefill 1 x 2048, 8/2 x 128", 1, 2048, 2048, 8, 2, 128),
)

Arguments = tuple[torch.Tensor, LayerCache, AttentionMetadata]


def make_arguments(shape: Shape) -> Arguments:
    """Random queries and caches; blocks lie in random order, as after a while of serving."""
    num_blocks = -(-shape.seq_len // BLOCK_SIZE)
    total = shape.num_sequences * num_blocks
    cache = KVCache.allocate(
        num_layers=1,
        num_blocks=total,
        block_size=BLOCK_SIZE,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )
    cache.data.normal_()
    table = torch.randperm(total, dtype=torch.int32).view(shape.num_sequences, num_blocks)
    table[:, : shape.shared // BLOCK_SIZE] = table[0, : shape.shared // BLOCK_SIZE]
    seq_lens = torch.full((shape.num_sequences,), shape.seq_len, dtype=torch.int32)
    cu_seqlens_q = torch.arange(shape.num_sequences + 1, dtype=torch.int32) * shape.query_len
    lengths = seq_lens.numpy(), cu_seqlens_q.numpy()
    plan = (
        ForestPlan.from_block_tables(table.numpy(), *lengths, BLOCK_SIZE)
        if shape.forest
        else ForestPlan.flat(*lengths)
    )
    positions = torch.arange(shape.seq_len - shape.query_len, shape.seq_len, dtype=torch.int32)
    metadata = AttentionMetadata(
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        positions=positions.repeat(shape.num_sequences),
        slot_mapping=torch.full((shape.num_sequences * shape.query_len,), -1),
        block_table=table,
        max_query_len=shape.query_len,
        max_seq_len=shape.seq_len,
        work=plan,
    )
    q = torch.randn(shape.num_sequences * shape.query_len, shape.heads, shape.head_dim)
    return q, cache.layer(0), metadata


def copy_bandwidth(repeats: int) -> float:
    """Bytes read plus bytes written per second, copying 128 MiB."""
    source = torch.ones(32 << 20)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_s(lambda: target.copy_(source), repeats)


def call_next(turns: Iterator[Arguments], scale: float, impl: str) -> None:
    paged_attention(*next(turns), scale=scale, impl=impl)


def measure(shape: Shape, bandwidth: float, repeats: int) -> dict[str, float | str]:
    """Time every implementation that this machine can run."""
    # Calls go through four copies: a model's step reads other layers before it comes back to this one.
    copies = [make_arguments(shape) for _ in range(4)]
    plan = copies[0][2].plan
    assert plan is not None
    kv_bytes = plan.kv_tokens_read * shape.kv_heads * shape.head_dim * 2 * 4
    row: dict[str, float | str] = {"shape": shape.name, "bound_ms": kv_bytes / bandwidth * 1e3}
    for impl, reason in available_impls("cpu", torch.float32).items():
        if reason is not None:
            continue
        turns = cycle(copies)
        call = partial(call_next, turns, shape.head_dim**-0.5, impl)
        row[impl] = median_s(call, repeats if impl == "c" else 3) * 1e3
    best = min(value for name, value in row.items() if name in ("c", "torch") and isinstance(value, float))
    row["gflops"] = shape.flops / best / 1e6
    row["fraction"] = kv_bytes / bandwidth * 1e3 / best
    return row


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    repeats = arguments.repeats
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(repeats)
    print(
        f"{torch.get_num_threads()} threads, copy {bandwidth / 1e9:.1f} GB/s, load {os.getloadavg()[0]:.1f}"
    )
    columns = ["reference", "torch", "c", "bound_ms", "fraction", "gflops"]
    print(f"{'ms per call':34}" + "".join(f"{name:>11}" for name in columns))
    rows = []
    for shape in SHAPES:
        rows.append(measure(shape, bandwidth, repeats))
        cells = (rows[-1].get(name, float("nan")) for name in columns)
        print(f"{shape.name:34}" + "".join(f"{cell:11.2f}" for cell in cells), flush=True)
    figures = {"threads": torch.get_num_threads(), "copy_bytes_per_s": bandwidth, "rows": rows}
    publish("cpu_attention", figures, arguments)


if __name__ == "__main__":
    main()
