"""CUDA graphs of a step's parts: their sizes, the buffers they share, how they are captured and replayed.

A step takes the next larger size, and the rest of it is padding. Every size costs some 20 ms before the
engine is ready, and every token of padding is computed for nothing. So sizes lie close together where
computing costs, and apart where a step mostly reads the weights.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from octavo.attention import AttentionMetadata, DeviceForest, KVCache
from octavo.engine.gpu.device_rows import DeviceRows
from octavo.engine.memory import ExecutionPlan
from octavo.kernels.copies import copy_to, to_device
from octavo.models import Decoder


def sequence_sizes(max_num_seqs: int) -> list[int]:
    """Return rising numbers of sequences, at most a quarter apart from 16 on; the last is max_num_seqs."""
    sizes = [1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 32), *range(256, max_num_seqs, 64)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def token_sizes(max_num_tokens: int) -> list[int]:
    """Return rising numbers of tokens; from 1,024 to 4,096, where most prompts end, a GEMM's tile apart."""
    steps = [(64, 16), (128, 32), (256, 64), (512, 64), (1024, 128), (4096, 128), (max_num_tokens, 512)]
    sizes = [16]
    for limit, step in steps:
        sizes += range(sizes[-1] + step, limit + 1, step)
    return [*(size for size in sizes if size < max_num_tokens), max_num_tokens]


def next_size(sizes: Sequence[int], number: int) -> int:
    """Return the smallest of rising sizes that is at least `number`."""
    return sizes[bisect_left(sizes, number)]


class StepBuffers:
    """Inputs and results that graphs share.

        decode graph    tokens ----> last [S, width]
        mixed graph     tokens ----> hidden [T, width], of which `select` takes last
        sampling graph  last, rows, positions ----> outcome [S]

    Attributes:
        rows: [S] int32, device row of each sequence that samples; -1: padding.
        positions: [S] int32, position of the token that its row of `last` was computed from.
        decode_inputs: [groups, 4, S] int32: of each group of layers positions, of the first one the same
            tensor, then input ids, slots and sequence lengths of a decode step.
        hidden: [T, width] hidden states of a mixed step.
        last: [S, width] hidden states that tokens are sampled from.
        outcome: [S] int32 sampled token ids, -1 where logits were not finite.
    """

    def __init__(self, decoder: Decoder, plan: ExecutionPlan) -> None:
        """Allocate all of them.

        Args:
            decoder: makes the hidden states.
            plan: S, most sequences of a step, T, most tokens of a step, and a CUDA device.
        """
        max_num_seqs, device = plan.max_num_seqs, plan.device
        num_inputs = 4 * len(plan.layout.groups)
        self._data = torch.zeros((2 + num_inputs, max_num_seqs), dtype=torch.int32, device=device)
        self._data[0] = -1
        self.rows, self._places, self.positions = self._data[:3]
        self.decode_inputs = self._data[2:].view(-1, 4, max_num_seqs)
        shape = (plan.max_num_tokens, decoder.config.hidden_size)
        self.hidden = torch.zeros(shape, dtype=decoder.dtype, device=device)
        self.last = torch.zeros((max_num_seqs, shape[1]), dtype=decoder.dtype, device=device)
        self.outcome = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)

    def set_decoding(self, rows: Sequence[int], size: int) -> None:
        """Set the rows of decode steps, padded to `size`."""
        host = np.full(size, -1, dtype=np.int32)
        host[: len(rows)] = rows
        self.rows[:size].copy_(to_device(host, self._data.device))

    def set_sampling(self, rows: Sequence[int], places: np.ndarray, ends: Sequence[int]) -> None:
        """Set the rows that sample in a mixed step.

        Args:
            rows: S device rows.
            places: [S] rows of `hidden`.
            ends: positions of the tokens to be sampled.
        """
        host = np.zeros((3, self._data.shape[1]), dtype=np.int32)
        host[0] = -1
        host[0, : len(rows)] = rows
        host[1, : len(rows)] = places
        host[2, : len(rows)] = np.array(ends) - 1
        copy_to(self._data[:3], host)

    def select(self, num_seqs: int) -> None:
        """Take the hidden states of S sequences, as set_sampling placed them, from those of a mixed step."""
        torch.index_select(self.hidden, 0, self._places[:num_seqs], out=self.last[:num_seqs])


Variant = TypeVar("Variant", bound=Hashable)


class GraphPool:
    """Captures graphs whose temporary memory is one pool: a replay may overwrite what another one left there.

    torch.cuda.graph would wait for the device and give all cached memory back before each capture; this does
    neither, so that a hundred captures take a second or two.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # Memory of the pool belongs to a stream: captures on another one could not use it again.
        self._stream = torch.cuda.Stream()

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture what `run` launches. Kernels may be compiled and loaded meanwhile: the mode is relaxed."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                run()
            finally:
                graph.capture_end()
        return graph


class StepGraphs(ABC, Generic[Variant]):
    """CUDA graphs of one part of a step, one for each variant of it, on buffers that stay where they are.

    Attributes:
        network: what the graphs run.
        state: the sequences' rows.
        buffers: what graphs hand to one another.
        num_captured: graphs so far.
    """

    def __init__(
        self, pool: GraphPool, network: "CapturedNetwork", state: DeviceRows, buffers: StepBuffers
    ) -> None:
        self.network = network
        self.state = state
        self.buffers = buffers
        self.num_captured = 0
        self._pool = pool
        self._captured: dict[Variant, torch.cuda.CUDAGraph] = {}
        self.allocate()

    @abstractmethod
    def allocate(self) -> None:
        """Allocate what the graphs read beside the buffers, and choose their sizes."""

    @abstractmethod
    def variants(self) -> Iterable[Variant]:
        """List all variants that a step may need, the largest first: it sizes the pool."""

    @abstractmethod
    def launch(self, variant: Variant, network: "CapturedNetwork") -> None:
        """Launch a variant's kernels, of this network."""

    def capture(self, variant: Variant) -> None:
        """Make a variant's graph, if there is none."""
        if variant not in self._captured:
            self._captured[variant] = self._pool.capture(lambda: self.launch(variant, self.network))
            self.num_captured += 1

    def release(self) -> None:
        """Destroy all graphs."""
        self._captured.clear()

    def replay(self, variant: Variant) -> None:
        """Run a variant's graph; one that was not prepared is captured first."""
        graph = self._captured.get(variant)
        if graph is None:
            self.capture(variant)
            graph = self._captured[variant]
        graph.replay()


@dataclass(frozen=True, slots=True)
class CapturedNetwork:
    """The network as graphs capture it: over one cache, with limits in place of each step's own lengths.

    Attributes:
        decoder: the network.
        kv_cache: its cache.
        forests: what sequences of a step have in common in each group of layers, where steps are said to
            share; None: they never do, or the group has no layers.
        max_model_len: longest sequence, tokens.
    """

    decoder: Decoder
    kv_cache: KVCache
    forests: tuple[DeviceForest | None, ...]
    max_model_len: int

    @property
    def can_share(self) -> bool:
        """Whether steps may read what sequences have in common once."""
        return any(self.forests)

    def shortened(self) -> "CapturedNetwork":
        """Return a network with one layer of each kind: it launches every kernel that this one does."""
        layers = {}
        for layer in self.decoder.layers:
            layers.setdefault(layer.kind, layer)
        return replace(self, decoder=replace(self.decoder, layers=tuple(layers.values())))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        groups: Sequence[tuple[Tensor, Tensor]],
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        *,
        max_query_len: int,
        shares: bool,
        is_fresh: bool = False,
        keys_are_old: bool = False,
    ) -> Tensor:
        """Run the network.

        Args:
            input_ids, positions: [T] int32.
            groups: of each group of layers slots, [T] int32 cache rows, -1: the token is padding; and block
                table, [S, columns] int32.
            cu_seqlens_q: [S + 1] int32.
            seq_lens: [S] int32.
            max_query_len: most new tokens of a sequence.
            shares: the forests hold plans of this step.
            is_fresh, keys_are_old: see AttentionMetadata.

        Returns:
            [T, hidden] as Decoder.forward.
        """
        metadata = (
            AttentionMetadata(
                cu_seqlens_q=cu_seqlens_q,
                seq_lens=seq_lens,
                positions=positions,
                slot_mapping=slots,
                block_table=block_table,
                max_query_len=max_query_len,
                max_seq_len=self.max_model_len,
                work=forest if shares else None,
                is_fresh=is_fresh,
                keys_are_old=keys_are_old,
            )
            for (slots, block_table), forest in zip(groups, self.forests, strict=True)
        )
        return self.decoder.forward(input_ids, self.kv_cache, *metadata)
