"""CUDA graphs of a step's parts: how they are captured and replayed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from octavo.attention import AttentionMetadata, DeviceForest, KVCache
from octavo.engine.gpu.buffers import StepBuffers
from octavo.engine.gpu.device_rows import DeviceRows
from octavo.models import Decoder

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
        forest: what sequences of a step have in common, where steps are said to share; None: they never do.
        max_model_len: longest sequence, tokens.
    """

    decoder: Decoder
    kv_cache: KVCache
    forest: DeviceForest | None
    max_model_len: int

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
        slots: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        max_query_len: int,
        shares: bool,
        is_fresh: bool = False,
        keys_are_old: bool = False,
    ) -> Tensor:
        """Run the network.

        Args:
            input_ids, positions: [T] int32.
            slots: [T] int32 cache rows; -1: the token is padding.
            cu_seqlens_q: [S + 1] int32.
            seq_lens: [S] int32.
            block_table: [S, columns] int32.
            max_query_len: most new tokens of a sequence.
            shares: the forest holds a plan of this step.
            is_fresh, keys_are_old: see AttentionMetadata.

        Returns:
            [T, hidden] as Decoder.forward.
        """
        metadata = AttentionMetadata(
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            positions=positions,
            slot_mapping=slots,
            block_table=block_table,
            max_query_len=max_query_len,
            max_seq_len=self.max_model_len,
            work=self.forest if shares else None,
            is_fresh=is_fresh,
            keys_are_old=keys_are_old,
        )
        return self.decoder.forward(input_ids, self.kv_cache, metadata)
