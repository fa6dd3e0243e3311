"""Decoding with shared prefixes on one GPU: shared blocks read once, beside reading each sequence flat.

    python benchmarks/gpu_forest.py [--fa3 path/to/_vllm_fa3_C.abi3.so[.xz]] [--flashinfer [DIRECTORY]]
                                    [--save MACHINE]

Every implementation reads the same block tables, in which sequences share blocks. Keys, values and queries
are random. Each replay of a CUDA graph runs several layers, each with a cache of its own, so that no layer
finds its keys in the L2 cache. Each result is compared with the flat kernel's before it is timed. The bound
counts every block that is seen once: the larger of bytes over the measured copy rate and operations over the
measured matrix rate. "plan us" is the host's planning time: Octavo plans when sequences join or leave,
FlashInfer in every step. Layers with a window share here whether it pays or not; "pays" says whether the
planner would let them, and peers are measured without windows only. Prints a table, then one line of JSON.
gpu_forest_sweep.py compares tilings.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from peers import flashinfer as flashinfer_peer
from peers.flash_attention_3 import call_flash_attention_3, load_flash_attention_3
from support.common import make_parser, median_s, publish, table
from support.forest_workloads import BLOCK_SIZE, WORKLOADS, Workload, make_block_tables
from support.gpu_timing import copy_rate, graph_seconds, matrix_rate
from torch import Tensor

from octavo.attention import AttentionMetadata, DeviceForest, KVCache
from octavo.attention.gpu_paged import attend_fat_nodes, attend_with_map
from octavo.attention.score_options import ScoreOptions
from octavo.attention.tilings.portable import TileShape
from octavo.attention.triton.nodes import attend_thin_nodes, node_call
from octavo.attention.triton.step_map import make_step_map
from octavo.attention.triton.window_nodes import see_nodes

# Keys and values that one replay reads at least, several times the L2 cache.
_MIN_REPLAY_BYTES = 400 << 20
_MAX_ERROR = 5e-3
# A cascade rounds each level's results, and what they merge into, to bfloat16.
_MAX_CASCADE_ERROR = 1e-2

Attend = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class Batch:
    """A workload's tensors on the GPU, and its block table on the host too."""

    workload: Workload
    q: Tensor
    cache: KVCache
    metadata: AttentionMetadata
    block_tables: np.ndarray

    @property
    def num_layers(self) -> int:
        return self.cache.data.shape[0]

    @property
    def options(self) -> ScoreOptions:
        return ScoreOptions(self.workload.head_dim**-0.5, self.workload.window)


def make_batch(workload: Workload) -> Batch:
    """Draw random queries, and random caches for so many layers that a replay floods the L2 cache."""
    block_tables = make_block_tables(workload)
    cache = KVCache.allocate(
        num_layers=min(16, -(-_MIN_REPLAY_BYTES // workload.kv_bytes) + 1),
        num_blocks=int(block_tables.max()) + 1,
        block_size=BLOCK_SIZE,
        num_kv_heads=workload.kv_heads,
        head_dim=workload.head_dim,
        dtype=torch.bfloat16,
        device="cuda",
    )
    cache.data.normal_()
    q = torch.randn(workload.batch, workload.heads, workload.head_dim, dtype=torch.bfloat16, device="cuda")
    return Batch(workload, q, cache, _metadata(block_tables, workload.seq_len), block_tables)


def _metadata(block_tables: np.ndarray, seq_len: int, query_len: int = 1) -> AttentionMetadata:
    """Metadata of sequences of equal lengths."""
    batch = block_tables.shape[0]
    return AttentionMetadata(
        cu_seqlens_q=(torch.arange(batch + 1, device="cuda") * query_len).int(),
        seq_lens=torch.full((batch,), seq_len, dtype=torch.int32, device="cuda"),
        positions=torch.full((batch * query_len,), seq_len - 1, dtype=torch.int32, device="cuda"),
        slot_mapping=torch.full((batch * query_len,), -1, device="cuda"),
        block_table=torch.from_numpy(block_tables).cuda(),
        max_query_len=query_len,
        max_seq_len=seq_len,
    )


def octavo_flat(batch: Batch, leaf: TileShape | None = None) -> Attend:
    """Return a call of the kernels without sharing, with a task map made beforehand, as layers share it."""
    workload, metadata, options = batch.workload, batch.metadata, batch.options
    step_map = make_step_map(
        metadata,
        num_tokens=workload.batch,
        num_heads=workload.heads,
        num_kv_heads=workload.kv_heads,
        head_dim=workload.head_dim,
        dtype=torch.bfloat16,
        block_size=BLOCK_SIZE,
        window=workload.window,
        decode=leaf,
    )
    return lambda layer: attend_with_map(batch.q, batch.cache.layer(layer), metadata, options, step_map)[0]


def make_forest(batch: Batch, **tiling: object) -> DeviceForest:
    """Make a forest and upload the workload's plan."""
    workload = batch.workload
    forest = DeviceForest(
        max_num_seqs=workload.batch,
        num_heads=workload.heads,
        num_kv_heads=workload.kv_heads,
        head_dim=workload.head_dim,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
        device="cuda",
        max_partials=64 * workload.batch,
        window=workload.window,
        **tiling,  # pyright: ignore[reportArgumentType]
    )
    forest.upload(forest.plan(*_host_arrays(batch), always=workload.window is not None))
    return forest


def _host_arrays(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    size = batch.workload.batch
    return batch.block_tables, np.full(size, batch.workload.seq_len), np.arange(size + 1)


def octavo_forest(batch: Batch, leaf: TileShape | None = None, **tiling: object) -> Attend:
    """Return a call of the kernels that read shared blocks once."""
    forest = make_forest(batch, **tiling)
    return octavo_flat(replace(batch, metadata=replace(batch.metadata, work=forest)), leaf)


def octavo_nodes(batch: Batch, forest: DeviceForest) -> Attend:
    """Return a call of the shared nodes' kernels alone, which returns the forest's partial results."""
    if forest.window is not None:
        see_nodes(forest, batch.metadata.positions, forest.window)

    def attend(layer: int) -> Tensor:
        cache = batch.cache.layer(layer)
        call = node_call(batch.q, cache, batch.metadata.positions, batch.options, forest)
        attend_fat_nodes(call, forest, decodes=True)
        if forest.has_thin_units:
            attend_thin_nodes(call, forest)
        return forest.partial_out

    return attend


def fa3_flat(batch: Batch) -> Attend:
    """Return a call of FlashAttention-3 over the shared blocks, each sequence by itself."""
    caches = _token_major(batch)
    scale = batch.options.scale
    return lambda layer: call_flash_attention_3(batch.q, *caches[layer], batch.metadata, scale)


def fa3_twice(batch: Batch) -> Attend:
    """Return two calls of FlashAttention-3, over the common root and over the rest, without their merge."""
    caches, scale, root_len = _token_major(batch), batch.options.scale, batch.workload.levels[0][1]
    columns = root_len // BLOCK_SIZE
    root = _metadata(np.ascontiguousarray(batch.block_tables[:1, :columns]), root_len, batch.workload.batch)
    own = _metadata(np.ascontiguousarray(batch.block_tables[:, columns:]), batch.workload.seq_len - root_len)

    def attend(layer: int) -> Tensor:
        call_flash_attention_3(batch.q, *caches[layer], root, scale, False)
        return call_flash_attention_3(batch.q, *caches[layer], own, scale)

    return attend


def _token_major(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Copy each layer's caches to [N, B, KH, D] in memory, as FlashAttention-3 wants them."""
    layers = [batch.cache.layer(layer) for layer in range(batch.num_layers)]
    return [(layer.k.contiguous(), layer.v.contiguous()) for layer in layers]


def flashinfer_problem(batch: Batch) -> flashinfer_peer.Problem:
    """Hand the workload to FlashInfer, which reads the caches as they lie in memory."""
    layers = [batch.cache.layer(layer) for layer in range(batch.num_layers)]
    caches = [(layer.k.transpose(1, 2), layer.v.transpose(1, 2)) for layer in layers]
    return flashinfer_peer.Problem(
        batch.q, caches, batch.block_tables, batch.workload.levels, batch.options.scale
    )


def relative_error(out: Tensor, expected: Tensor) -> float:
    """|out - expected| / |expected|."""
    return ((out.double() - expected.double()).norm() / expected.double().norm()).item()


def seconds_per_layer(batch: Batch, attend: Attend) -> float:
    """Median seconds of one layer's attention."""

    def all_layers() -> None:
        for layer in range(batch.num_layers):
            attend(layer)

    return graph_seconds(all_layers, 1) / batch.num_layers


def check(batch: Batch, attend: Attend, max_error: float = _MAX_ERROR) -> float:
    """Compare the last layer's result with the flat kernel's; torch.empty is poisoned. Returns the error."""
    layer = batch.num_layers - 1
    torch.use_deterministic_algorithms(True)
    error = relative_error(attend(layer), octavo_flat(batch)(layer))
    torch.use_deterministic_algorithms(False)
    if not error < max_error:
        raise AssertionError(f"{batch.workload.name}: the error against the flat kernel is {error:.1e}")
    return error


@dataclass(frozen=True, slots=True)
class Implementation:
    """Something that runs a workload.

    Attributes:
        name: for the table.
        attend: takes a layer.
        max_error: allowed error against the flat kernel; None if the result is only a part.
        plan: the host's part, if there is one to time.
    """

    name: str
    attend: Attend
    max_error: float | None = _MAX_ERROR
    plan: Callable[[], object] | None = None


def implementations(batch: Batch, with_fa3: bool, flashinfer: ModuleType | None) -> Iterator[Implementation]:
    """Yield everything that runs a workload."""
    forest = make_forest(batch)
    yield Implementation(
        "octavo forest", octavo_forest(batch), plan=lambda: forest.plan(*_host_arrays(batch))
    )
    yield Implementation("octavo flat", octavo_flat(batch))
    if batch.workload.window is not None:
        return
    if with_fa3:
        yield Implementation("fa3 flat", fa3_flat(batch))
        if batch.workload.levels[0][0] == 1:
            yield Implementation("fa3 twice, no merge", fa3_twice(batch), None)
    if flashinfer is not None:
        for peer in flashinfer_peer.peers(flashinfer, flashinfer_problem(batch)):
            yield Implementation(peer.name, peer.attend, _MAX_CASCADE_ERROR, peer.plan)


def measure(batch: Batch, implementation: Implementation, bound_s: float) -> dict[str, object]:
    """Check and time one implementation."""
    figures: dict[str, object] = {}
    if implementation.plan is not None:
        figures["plan_us"] = round(median_s(implementation.plan) * 1e6)
    attend, max_error = implementation.attend, implementation.max_error
    error = "-" if max_error is None else f"{check(batch, attend, max_error):.1e}"
    seconds = seconds_per_layer(batch, attend)
    return {
        "us": round(seconds * 1e6, 1),
        "of_bound": round(bound_s / seconds, 3),
        "error": error,
        **figures,
    }


def compare(flashinfer: ModuleType | None, arguments: argparse.Namespace) -> None:
    """Measure every workload, print the table and publish the figures."""
    rates = {"copy_tb_per_s": copy_rate() / 1e12, "matrix_tflops": matrix_rate() / 1e12}
    rows, results = [], []
    for workload in WORKLOADS:
        batch = make_batch(workload)
        forest = make_forest(batch)
        bound_s = (
            max(workload.kv_bytes / rates["copy_tb_per_s"], workload.flops / rates["matrix_tflops"]) / 1e12
        )
        nodes_us = round(seconds_per_layer(batch, octavo_nodes(batch, forest)) * 1e6, 1)
        pays = forest.plan(*_host_arrays(batch)).num_units > 0
        for implementation in implementations(batch, arguments.fa3 is not None, flashinfer):
            name, figures = implementation.name, measure(batch, implementation, bound_s)
            if name == "octavo forest":
                figures |= {"nodes_us": nodes_us, "pays": pays}
            keys = ("us", "nodes_us", "of_bound", "error", "plan_us", "pays")
            cells = [figures.get(key, "-") for key in keys]
            rows.append([workload.name, name, f"{bound_s * 1e6:.1f}", *cells])
            results.append({"workload": workload.name, "impl": name, **figures})
    print(
        table(
            ["workload", "kernel", "bound us", "us", "nodes us", "of bound", "error", "plan us", "pays"], rows
        )
    )
    versions = {} if flashinfer is None else {"flashinfer": flashinfer.__version__}
    publish("gpu_forest", {**rates, **versions, "results": results}, arguments)


def main() -> None:
    """Compare implementations."""
    parser = make_parser(__doc__)
    parser.add_argument("--fa3", type=Path, help="FlashAttention-3's shared object, .so or .so.xz")
    parser.add_argument(
        "--flashinfer",
        nargs="?",
        const="",
        metavar="DIRECTORY",
        help="measure FlashInfer too: that of a directory, else the installed one",
    )
    arguments = parser.parse_args()
    if arguments.fa3:
        load_flash_attention_3(arguments.fa3)
    directory = arguments.flashinfer
    flashinfer = None if directory is None else flashinfer_peer.load(directory)
    compare(flashinfer, arguments)


if __name__ == "__main__":
    main()
