"""From a scheduled step to the arrays the model reads: token ids, positions, cache slots, block tables.

A slot is a row of the cache: block id * block_size + offset. On a GPU only mixed steps come through here;
decode steps build the same arrays on the device (engine/gpu/row_kernels.py).
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from octavo.attention import AttentionMetadata, ForestPlan
from octavo.engine.memory import ExecutionPlan
from octavo.engine.step.scheduled import ScheduledRequest
from octavo.kernels.copies import to_device
from octavo.kv import BlockTables

# Stand-in for a token that only the device knows; GpuRunner overwrites it with the real one.
_UNKNOWN = array("i", [0])


class GroupInput(NamedTuple):
    """What a step is for one of the cache's groups of layers.

    Attributes:
        slot_mapping: [T] int64 cache slot of each token (block id * block_size + offset).
        block_table: [S, max_blocks] int32; entries past a sequence's last block are stale, those before a
            window are any blocks.
    """

    slot_mapping: np.ndarray
    block_table: np.ndarray


@dataclass(frozen=True, slots=True)
class StepInput:
    """Host arrays of one step with S sequences and T tokens.

    Attributes:
        input_ids: [T] int32 token ids, sequence after sequence.
        positions: [T] int32 position of each token in its sequence.
        cu_seqlens_q: [S + 1] int32 cumulative numbers of new tokens.
        seq_lens: [S] int32 tokens in the cache after this step.
        groups: of each group of layers.
        logits_indices: [R] int64 tokens whose logits are needed, sorted by sequence.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    cu_seqlens_q: np.ndarray
    seq_lens: np.ndarray
    groups: tuple[GroupInput, ...]
    logits_indices: np.ndarray

    def metadata(self, plans: Sequence[ForestPlan | None], device: torch.device) -> list[AttentionMetadata]:
        """Return what attention of each group reads, on the device (on a CPU it shares this object's memory).

        Args:
            plans: of each group.
            device: where the tensors will be.
        """
        common = {
            "cu_seqlens_q": to_device(self.cu_seqlens_q, device),
            "seq_lens": to_device(self.seq_lens, device),
            "positions": to_device(self.positions, device),
            "max_query_len": int(np.diff(self.cu_seqlens_q).max()),
            "max_seq_len": int(self.seq_lens.max()),
        }
        return [
            AttentionMetadata(
                **common,
                slot_mapping=to_device(group.slot_mapping, device),
                block_table=to_device(group.block_table, device),
                work=plan,
            )
            for group, plan in zip(self.groups, plans, strict=True)
        ]


class StepInputBuilder:
    """Keeps one row of each group's block table per running request, and builds each step's arrays.

    Rows grow at their end and are not rebuilt: a step costs O(new blocks), not O(all blocks).

    Attributes:
        tables: of each group of layers.
    """

    def __init__(self, plan: ExecutionPlan) -> None:
        self.block_size = plan.block_size
        self.tables = [BlockTables(plan.max_num_seqs, plan.table_columns) for _ in plan.layout.groups]

    def build(self, scheduled: list[ScheduledRequest]) -> StepInput:
        """Turn a step's requests into arrays; brings their rows of the block tables up to date first."""
        requests = [item.request for item in scheduled]
        for request in requests:
            for tables, block_ids in zip(self.tables, request.blocks.lists, strict=True):
                tables.update(request.row, block_ids)
        query_lens = np.array([item.num_new_tokens for item in scheduled], dtype=np.int32)
        num_computed = np.array([item.start for item in scheduled], dtype=np.int32)
        rows = np.array([request.row for request in requests])
        cu_seqlens_q = np.zeros(len(scheduled) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=cu_seqlens_q[1:])
        seq_lens = num_computed + query_lens
        sequence_of_token = np.repeat(np.arange(len(scheduled)), query_lens)
        positions = np.arange(cu_seqlens_q[-1], dtype=np.int32)
        positions += (num_computed - cu_seqlens_q[:-1])[sequence_of_token]
        num_columns = -(-int(seq_lens.max()) // self.block_size)
        column, offset = positions // self.block_size, positions % self.block_size
        groups = []
        for tables in self.tables:
            block_table = tables.rows(rows, num_columns)
            blocks = block_table[sequence_of_token, column].astype(np.int64)
            groups.append(GroupInput(blocks * self.block_size + offset, block_table))
        return StepInput(
            input_ids=_new_token_ids(scheduled),
            positions=positions,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            groups=tuple(groups),
            logits_indices=_logits_indices(scheduled, cu_seqlens_q),
        )


def _new_token_ids(scheduled: list[ScheduledRequest]) -> np.ndarray:
    token_ids = array("i")
    for item in scheduled:
        token_ids += item.request.token_ids[item.start : item.end] or _UNKNOWN
    return np.frombuffer(token_ids, dtype=np.int32)


def _logits_indices(scheduled: list[ScheduledRequest], cu_seqlens_q: np.ndarray) -> np.ndarray:
    """Return [R] int64, the last token of each sequence that samples; other tokens need no logits."""
    samples = np.array([item.samples for item in scheduled], dtype=bool)
    return (cu_seqlens_q[1:] - 1)[samples].astype(np.int64)
