"""FlashInfer 0.7.2 as a peer of gpu_forest.py: its decode kernels read flat, its cascades share levels.

The caller declares a cascade's levels. Plans are made before the timing, because all layers share them.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Workspace for partial results of split keys; FlashInfer recommends 128 MiB or more.
_WORKSPACE_BYTES = 512 << 20
_LAYOUT = "HND"


@dataclass(frozen=True, slots=True)
class Problem:
    """One query token for each of S sequences whose blocks form levels of equal nodes.

    Attributes:
        q: [S, H, D].
        caches: each layer's (k_cache, v_cache), each [N, KH, B, D] in memory, of q's dtype.
        block_tables: [S, blocks] int32; the sequences of a node lie side by side.
        levels: (nodes, tokens of each) from the root to the sequences' own parts; every number of tokens
            is a multiple of B.
        scale: of the scores.
    """

    q: Tensor
    caches: Sequence[tuple[Tensor, Tensor]]
    block_tables: np.ndarray
    levels: Sequence[tuple[int, int]]
    scale: float

    @property
    def block_size(self) -> int:
        return self.caches[0][0].shape[2]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Query heads, KV heads, head dimension and block size."""
        return self.q.shape[1], self.caches[0][0].shape[1], self.q.shape[2], self.block_size


@dataclass(frozen=True, slots=True)
class Level:
    """A level as FlashInfer takes it; all int32, on the host but for `blocks`.

    Attributes:
        cu_queries: [nodes + 1], each node's first query.
        cu_blocks: [nodes + 1], each node's first entry of `blocks`.
        blocks: [nodes * blocks of each], block ids, on the queries' device.
        last_block_len: [nodes], tokens in each node's last block.
    """

    cu_queries: Tensor
    cu_blocks: Tensor
    blocks: Tensor
    last_block_len: Tensor


@dataclass(frozen=True, slots=True)
class Peer:
    """A way to attend with FlashInfer.

    Attributes:
        name: for the table.
        plan: makes the plan anew, from lengths on the host to work lists on the device.
        attend: takes a layer, returns [S, H, D].
    """

    name: str
    plan: Callable[[], None]
    attend: Callable[[int], Tensor]


def load(directory: str = "") -> ModuleType:
    """Import FlashInfer.

    Args:
        directory: folder with FlashInfer and its dependencies, searched before installed packages; or empty.

    Raises:
        ImportError: it is not installed, or a dependency is missing.
    """
    if directory:
        sys.path.insert(0, str(Path(directory).resolve()))
    return importlib.import_module("flashinfer")


def make_levels(problem: Problem) -> list[Level]:
    """Say which blocks belong to each level's nodes, and which queries read them."""
    return [
        _make_level(problem, count, problem.block_tables[:, begin:end])
        for count, begin, end in _columns(problem)
    ]


def _columns(problem: Problem) -> Iterator[tuple[int, int, int]]:
    """Yield each level's nodes and its first and last but one column of the block tables."""
    begin = 0
    for count, num_tokens in problem.levels:
        end = begin + num_tokens // problem.block_size
        yield count, begin, end
        begin = end


def _make_level(problem: Problem, count: int, columns: np.ndarray) -> Level:
    """Make the level of `count` nodes whose blocks are some columns of the block tables."""
    blocks = columns[:: len(columns) // count]
    steps = torch.arange(count + 1, dtype=torch.int32)
    return Level(
        cu_queries=steps * (len(columns) // count),
        cu_blocks=steps * blocks.shape[1],
        blocks=torch.from_numpy(blocks.flatten()).to(problem.q.device),
        last_block_len=torch.full((count,), problem.block_size, dtype=torch.int32),
    )


def peers(flashinfer: ModuleType, problem: Problem) -> Iterator[Peer]:
    """Yield FlashInfer's ways to attend, each planned."""
    device = problem.q.device
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    levels = make_levels(problem)
    yield decode(flashinfer, problem, workspace, use_tensor_cores=True)
    yield decode(flashinfer, problem, workspace, use_tensor_cores=False)
    yield cascade(flashinfer, problem, workspace, levels)
    yield cascade_by_hand(flashinfer, problem, workspace, levels, "fa2")


def decode(flashinfer: ModuleType, problem: Problem, workspace: Tensor, use_tensor_cores: bool) -> Peer:
    """Return the decode kernels over the shared blocks, each sequence by itself."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, _LAYOUT, use_tensor_cores=use_tensor_cores
    )
    flat = _make_level(problem, len(problem.block_tables), problem.block_tables)

    def plan() -> None:
        arrays = (flat.cu_blocks, flat.blocks, flat.last_block_len)
        wrapper.plan(*arrays, *problem.sizes, **_options(problem))

    plan()
    cores = "tensor cores" if use_tensor_cores else "CUDA cores"
    return Peer(
        f"flashinfer decode, {cores}", plan, lambda layer: wrapper.run(problem.q, problem.caches[layer])
    )


def cascade(flashinfer: ModuleType, problem: Problem, workspace: Tensor, levels: Sequence[Level]) -> Peer:
    """Return FlashInfer's own cascade, which chooses its kernels itself."""
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(levels), workspace, _LAYOUT)

    def plan() -> None:
        wrapper.plan(
            [level.cu_queries for level in levels],
            [level.cu_blocks for level in levels],
            [level.blocks for level in levels],
            [level.last_block_len for level in levels],
            *problem.sizes,
            **_options(problem),
        )

    plan()
    return Peer(
        f"flashinfer cascade, {len(levels)} levels",
        plan,
        lambda layer: wrapper.run(problem.q, problem.caches[layer]),
    )


def cascade_by_hand(
    flashinfer: ModuleType, problem: Problem, workspace: Tensor, levels: Sequence[Level], backend: str
) -> Peer:
    """Return the cascade's steps by the kernels of one backend, without clearing results first."""
    wrappers = [
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, _LAYOUT, backend=backend) for _ in levels
    ]

    def plan() -> None:
        for wrapper, level in zip(wrappers, levels, strict=True):
            arrays = (level.cu_queries, level.cu_blocks, level.blocks, level.last_block_len)
            wrapper.plan(*arrays, *problem.sizes, **_options(problem))

    def run(wrapper: Any, layer: int) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(problem.q)
        return wrapper.run(problem.q, problem.caches[layer], out=out, return_lse=True)

    def attend(layer: int) -> Tensor:
        out, lse = run(wrappers[-1], layer)
        for wrapper in wrappers[:-1]:
            flashinfer.merge_state_in_place(out, lse, *run(wrapper, layer))
        return out

    plan()
    return Peer(f"flashinfer cascade, {len(levels)} levels, {backend}", plan, attend)


def _options(problem: Problem) -> dict[str, Any]:
    """Return the options of every plan."""
    dtype = problem.q.dtype
    return {"sm_scale": problem.scale, "q_data_type": dtype, "kv_data_type": dtype}
