"""Attention kernels on one NVIDIA GPU, beside FlashAttention-3 if you have its shared object.

    python benchmarks/gpu_attention.py [--fa3 path/to/_vllm_fa3_C.abi3.so[.xz]] [--block-sizes 16 64 256]
                                       [--kv-cache-dtype fp8] [--only decode] [--save MACHINE]

Each workload has its own random keys, values and queries: zeros would draw less power, and keys still in the
L2 cache would read faster. Each time is the median over replays of a CUDA graph of several calls. The
bound is the larger of bytes over the measured copy rate and operations over the measured matrix rate. Prints
a table, then one line of JSON.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peers.flash_attention_3 import call_flash_attention_3, load_flash_attention_3
from support.common import make_parser, publish, table
from support.gpu_timing import copy_rate, graph_seconds, matrix_rate
from torch import Tensor

from octavo.attention import AttentionMetadata, KVCache, LayerCache
from octavo.attention.cache import FLOAT8, read_rows
from octavo.attention.gpu_paged import attend_with_map, make_step_map
from octavo.attention.score_options import ScoreOptions

Attend = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Workload:
    """A batch of sequences: seq_len tokens in the cache, the query_len new ones included.

    With `shortest` the lengths spread evenly from there to seq_len, in an order that mixes them.
    """

    name: str
    batch: int
    query_len: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    shortest: int | None = None

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each sequence."""
        if self.shortest is None:
            return [self.seq_len] * self.batch
        lens = torch.linspace(self.shortest, self.seq_len, self.batch).int()
        return lens[torch.randperm(self.batch, generator=torch.Generator().manual_seed(0))].tolist()

    @property
    def flops(self) -> int:
        """Floating-point operations of both products over the visible (query, key) pairs."""
        pairs = sum(self.query_len * (2 * seq_len - self.query_len + 1) // 2 for seq_len in self.seq_lens)
        return 4 * self.heads * self.head_dim * pairs


WORKLOADS = (
    Workload("decode 256x1024 16/8", 256, 1, 1024, 16, 8),
    Workload("decode 256x4096 16/8", 256, 1, 4096, 16, 8),
    Workload("decode 64x8192 32/8", 64, 1, 8192, 32, 8),
    Workload("decode 8x16384 32/8", 8, 1, 16384, 32, 8),
    Workload("decode 1x32768 32/8", 1, 1, 32768, 32, 8),
    Workload("decode 256x1024 9/3x64", 256, 1, 1024, 9, 3, 64),
    Workload("decode 128 x 100..2000 16/8", 128, 1, 2000, 16, 8, shortest=100),
    Workload("decode 256x160 16/8", 256, 1, 160, 16, 8),
    Workload("decode 1x512 16/8", 1, 1, 512, 16, 8),
    Workload("prefill 1x8192 32/8", 1, 8192, 8192, 32, 8),
    Workload("prefill 8x2048 32/8", 8, 2048, 2048, 32, 8),
    Workload("extend 8x(512 on 8192) 32/8", 8, 512, 8704, 32, 8),
)


@dataclass(frozen=True, slots=True)
class Batch:
    """A workload's tensors on the GPU."""

    workload: Workload
    q: Tensor
    cache: LayerCache
    metadata: AttentionMetadata

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        shape = self.workload
        return 2 * sum(shape.seq_lens) * shape.kv_heads * shape.head_dim * self.cache.k.itemsize

    @property
    def options(self) -> ScoreOptions:
        return ScoreOptions(self.workload.head_dim**-0.5)


def make_batch(workload: Workload, block_size: int) -> Batch:
    """Draw random queries and a random cache whose blocks lie in random order."""
    columns = -(-workload.seq_len // block_size)
    cache = KVCache.allocate(
        num_layers=1,
        num_blocks=workload.batch * columns,
        block_size=block_size,
        num_kv_heads=workload.kv_heads,
        head_dim=workload.head_dim,
        dtype=torch.bfloat16,
        device="cuda",
    )
    cache.data.normal_()
    num_tokens = workload.batch * workload.query_len
    q = torch.randn(num_tokens, workload.heads, workload.head_dim, dtype=torch.bfloat16, device="cuda")
    seq_lens = torch.tensor(workload.seq_lens, dtype=torch.int32, device="cuda")
    new = seq_lens[:, None] + torch.arange(-workload.query_len, 0, device="cuda")
    block_ids = torch.randperm(workload.batch * columns, device="cuda")
    metadata = AttentionMetadata(
        cu_seqlens_q=(torch.arange(workload.batch + 1, device="cuda") * workload.query_len).int(),
        seq_lens=seq_lens,
        positions=new.flatten().int(),
        slot_mapping=torch.full((num_tokens,), -1, device="cuda"),
        block_table=block_ids.view(workload.batch, columns).int(),
        max_query_len=workload.query_len,
        max_seq_len=workload.seq_len,
    )
    return Batch(workload, q, cache.layer(0), metadata)


def to_float8(batch: Batch) -> Batch:
    """Return the same batch over a float8 cache of the same layout."""
    return replace(batch, cache=LayerCache(batch.cache.k.to(FLOAT8), batch.cache.v.to(FLOAT8)))


def octavo_attention(batch: Batch) -> Attend:
    """Return a call of Octavo's kernels with a task map made beforehand, as layers share it."""
    step_map = make_step_map(batch.q, batch.cache, batch.metadata)
    return lambda: attend_with_map(batch.q, batch.cache, batch.metadata, batch.options, step_map)[0]


def flash_attention_3(batch: Batch) -> Attend:
    """Return a call of FlashAttention-3's paged kernel; it wants blocks as [N, B, KH, D] in memory."""
    caches = (batch.cache.k.contiguous(), batch.cache.v.contiguous())
    return lambda: call_flash_attention_3(batch.q, *caches, batch.metadata, batch.options.scale)


def relative_error(batch: Batch, out: Tensor, num_checked: int = 4) -> float:
    """|out - exact| / |exact| over the first and last sequence's last tokens, exact in float64."""
    workload, metadata = batch.workload, batch.metadata
    group = workload.heads // workload.kv_heads
    error = norm = 0.0
    for s in (0, workload.batch - 1):
        rows, seq_len = metadata.block_table[s].long(), workload.seq_lens[s]
        keys, values = (
            read_rows(c, (rows,), torch.float64, None).flatten(0, 1)[:seq_len]
            for c in (batch.cache.k, batch.cache.v)
        )
        tokens = torch.arange(workload.query_len)[-num_checked:].cuda() + s * workload.query_len
        q = batch.q[tokens].double().unflatten(1, (workload.kv_heads, group))
        scores = torch.einsum("thgd,khd->thgk", q, keys) * batch.options.scale
        hidden = torch.arange(seq_len, device="cuda") > metadata.positions[tokens][:, None]
        weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
        exact = torch.einsum("thgk,khd->thgd", weights, values).flatten(1, 2)
        error += (out[tokens].double() - exact).square().sum().item()
        norm += exact.square().sum().item()
    return (error / norm) ** 0.5


def measure(batch: Batch, make: Callable[[Batch], Attend], rates: dict[str, float]) -> dict[str, float]:
    """Time and check one implementation on one batch; torch.empty is poisoned for the check."""
    bound_s = (
        max(batch.kv_bytes / rates["copy_tb_per_s"], batch.workload.flops / rates["matrix_tflops"]) / 1e12
    )
    attend = make(batch)
    torch.use_deterministic_algorithms(True)
    error = relative_error(batch, attend())
    torch.use_deterministic_algorithms(False)
    seconds = graph_seconds(attend)
    return {
        "bound_us": round(bound_s * 1e6, 1),
        "us": round(seconds * 1e6, 1),
        "of_bound": round(bound_s / seconds, 3),
        "tb_per_s": round(batch.kv_bytes / seconds / 1e12, 2),
        "tflops": round(batch.workload.flops / seconds / 1e12, 1),
        "error": float(f"{error:.1e}"),
    }


def main() -> None:
    """Measure every workload and print the table and the JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("--fa3", type=Path, help="FlashAttention-3's shared object, .so or .so.xz")
    parser.add_argument("--only", default="", help="run the workloads whose names contain this")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument(
        "--kv-cache-dtype", choices=["auto", "fp8"], default="auto", help="fp8: decode over float8 too"
    )
    arguments = parser.parse_args()
    implementations: dict[str, Callable[[Batch], Attend]] = {"octavo": octavo_attention}
    if arguments.fa3:
        load_flash_attention_3(arguments.fa3)
        implementations["fa3"] = flash_attention_3
    rates = {"copy_tb_per_s": copy_rate() / 1e12, "matrix_tflops": matrix_rate() / 1e12}
    rows, results = [], []
    for workload in (workload for workload in WORKLOADS if arguments.only in workload.name):
        for block_size in arguments.block_sizes:
            batch = make_batch(workload, block_size)
            measured = {name: measure(batch, make, rates) for name, make in implementations.items()}
            if arguments.kv_cache_dtype == "fp8" and workload.query_len == 1:
                measured["octavo fp8"] = measure(to_float8(batch), octavo_attention, rates)
            for name, figures in measured.items():
                rows.append([workload.name, block_size, name, *figures.values()])
                results.append({"workload": workload.name, "block_size": block_size, "impl": name, **figures})
    header = ["workload", "block", "kernel", "bound us", "us", "of bound", "TB/s", "TFLOP/s", "error"]
    print(table(header, rows))
    publish("gpu_attention", {**rates, "results": results}, arguments)


if __name__ == "__main__":
    main()
