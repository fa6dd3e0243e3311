"""CUDA graphs of whole steps: what is captured, and when."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from octavo.attention import AttentionMetadata, DeviceForest, KVCache
from octavo.models import Decoder

Variant = TypeVar("Variant", bound=Hashable)
Result = TypeVar("Result")


class StepGraphs(ABC, Generic[Variant, Result]):
    """CUDA graphs of one kind of step, one for each variant of it, captured on first use.

    All share a memory pool: a replay may overwrite what another graph's replay has left there.

    Attributes:
        warms_up: run `_warm_up` before a capture. Without it, kernels may be compiled and loaded during the
            capture, which CUDA's strict modes forbid.
    """

    warms_up = False

    def __init__(self) -> None:
        self._captured: dict[Variant, tuple[torch.cuda.CUDAGraph, Result]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def num_captured(self) -> int:
        """Variants that have a graph."""
        return len(self._captured)

    @abstractmethod
    def _run(self, variant: Variant) -> Result:
        """Launch a variant's kernels, on buffers that stay where they are."""

    def _warm_up(self, variant: Variant) -> None:
        """Launch a variant's kernels without a lasting effect: compiles them and sizes workspaces."""

    def _replay(self, variant: Variant) -> Result:
        """Run a variant's graph; returns what `_run` returned when it was captured."""
        captured = self._captured.get(variant)
        if captured is None:
            captured = self._captured[variant] = self._capture(variant)
        graph, result = captured
        graph.replay()
        return result

    def _capture(self, variant: Variant) -> tuple[torch.cuda.CUDAGraph, Result]:
        if self.warms_up:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._warm_up(variant)
            torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        mode = "global" if self.warms_up else "relaxed"
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode):
            result = self._run(variant)
        return graph, result


@dataclass(frozen=True, slots=True)
class CapturedNetwork:
    """The network as graphs capture it: over one cache, with limits in place of each step's own lengths.

    Attributes:
        decoder: the network.
        kv_cache: its cache.
        forest: what sequences of a step have in common, where steps are said to share; None: they never do.
        max_model_len: longest sequence, tokens.
        device: of all, a CUDA device.
    """

    decoder: Decoder
    kv_cache: KVCache
    forest: DeviceForest | None
    max_model_len: int
    device: torch.device

    @property
    def max_num_blocks(self) -> int:
        """Blocks of the longest sequence: columns of a block table."""
        return -(-self.max_model_len // self.kv_cache.block_size)

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
    ) -> Tensor:
        """Run the network.

        Args:
            input_ids: [T] int32.
            positions: [T] int32.
            slots: [T] int32 cache rows; -1: the token is padding.
            cu_seqlens_q: [S + 1] int32.
            seq_lens: [S] int32.
            block_table: [S, columns] int32.
            max_query_len: most new tokens of a sequence.
            shares: the forest holds a plan of this step.
            is_fresh: see AttentionMetadata.

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
        )
        return self.decoder.forward(input_ids, self.kv_cache, metadata)
