"""What an attention call needs to know about the step, passed explicitly."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.attention.lengths import check_lengths
from octavo.attention.plan.device_forest import DeviceForest
from octavo.attention.plan.host_plan import ForestPlan
from octavo.errors import InvalidArgumentError

_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's ragged batch of S sequences and T query tokens over a paged KV cache.

        |---- computed before ----|-- query_len --|
        |------------------ seq_len --------------|

    Construction checks shapes and dtypes. It checks the lengths only on a CPU: on a GPU that would wait for
    the device.

    Attributes:
        cu_seqlens_q: [S + 1] int32, cumulative query lengths; tokens of sequence s are
            cu_seqlens_q[s] : cu_seqlens_q[s + 1].
        seq_lens: [S] int32, tokens in the cache after this step's store, including the query tokens; 0 marks
            an empty row of a padded batch, whose query tokens see nothing.
        positions: [T] int32, absolute position of each query token in its sequence.
        slot_mapping: [T] int32 or int64, cache slot (block id * block_size + offset) where each query
            token's key and value go; -1 writes nothing, and a network may leave such a token out.
        block_table: [S, max_blocks] int32, block ids of each sequence; entries past its last block
            are never read.
        max_query_len: longest query, in tokens.
        max_seq_len: longest seq_len, in tokens.
        work: which keys the sequences share: a ForestPlan (host arrays) for the C and PyTorch kernels, a
            DeviceForest (device arrays) for GPU kernels, or None if nothing is shared. It changes the time of
            a step, not its results. Kernels ignore a plan of the other kind.
        kv_begin: [S] int32, the first key of each sequence that its tokens see, for caches padded on the left
            or sequences that share one block; None: 0. Nothing may be shared then.
        may_be_short: a sequence may have fewer tokens than queries. The positions of the first ones are then
            negative.
        is_fresh: the batch is one sequence with nothing in the cache yet, whose first token is token 0.
            Tokens after its last one are padding.
        keys_are_old: each sequence has one query token, and no sequence sees the key of another one's. GPU
            kernels may then read all else that is in the cache, and the metadata, while kernels that were
            launched to start early still run; all of it must be older than they are.
    """

    cu_seqlens_q: Tensor
    seq_lens: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    max_query_len: int
    max_seq_len: int
    work: ForestPlan | DeviceForest | None = None
    is_fresh: bool = False
    kv_begin: Tensor | None = None
    may_be_short: bool = False
    keys_are_old: bool = False

    def __post_init__(self) -> None:
        """Check the batch.

        Raises:
            InvalidArgumentError: a shape, a dtype or the lengths are invalid, or the plan is of other
                lengths.
        """
        _check_vector("cu_seqlens_q", "S + 1", self.cu_seqlens_q, _INTEGERS)
        _check_vector("seq_lens", "S", self.seq_lens, _INTEGERS)
        _check_vector("positions", "T", self.positions, _INTEGERS[:1])
        num_sequences = self.seq_lens.shape[0]
        table = self.block_table
        if table.dim() != 2 or table.shape[0] != num_sequences or table.dtype != torch.int32:
            raise InvalidArgumentError(
                f"block_table must be [{num_sequences}, max_blocks] int32, one row per seq_lens entry; "
                f"got {list(table.shape)} {table.dtype}"
            )
        if self.cu_seqlens_q.shape[0] != num_sequences + 1:
            raise InvalidArgumentError(
                f"cu_seqlens_q must have {num_sequences + 1} entries, one more than seq_lens; "
                f"got {self.cu_seqlens_q.shape[0]}"
            )
        if self.keys_are_old and self.max_query_len != 1:
            raise InvalidArgumentError(
                f"keys_are_old is for a single query token of each sequence, got {self.max_query_len}"
            )
        self.check_lengths()
        if self.kv_begin is not None or (self.plan is not None and self.plan.kv_begin is not None):
            self._check_kv_begin()

    @property
    def plan(self) -> ForestPlan | None:
        """The work if it is a plan for host kernels, else None."""
        return self.work if isinstance(self.work, ForestPlan) else None

    @property
    def forest(self) -> DeviceForest | None:
        """The work if it is a forest for GPU kernels, else None."""
        return self.work if isinstance(self.work, DeviceForest) else None

    def check_lengths(self) -> None:
        """Check the values of the lengths if they are on the CPU.

        Raises:
            InvalidArgumentError: the lengths are invalid, or the plan is of other lengths.
        """
        if not (self.seq_lens.is_cpu and self.cu_seqlens_q.is_cpu):
            return
        seq_lens, cu_seqlens_q = self.seq_lens.numpy(), self.cu_seqlens_q.numpy()
        # A plan's lengths are checked already, so equal ones are valid.
        if self.plan is None or not self.plan.lengths.equal(seq_lens, cu_seqlens_q):
            check_lengths(seq_lens, cu_seqlens_q, may_be_short=self.may_be_short)
            if self.plan is not None:
                raise InvalidArgumentError(
                    "the plan is of another step: it was made for other seq_lens or cu_seqlens_q; make a "
                    "plan for each step"
                )
        num_tokens = cu_seqlens_q[-1]
        if num_tokens > self.positions.shape[0]:
            raise InvalidArgumentError(
                f"cu_seqlens_q must end within the {self.positions.shape[0]} query tokens of positions, "
                f"got {num_tokens}; it holds the cumulative query lengths"
            )

    def _check_kv_begin(self) -> None:
        """Check the first keys, and that the work was made for them."""
        begin, num_sequences = self.kv_begin, self.seq_lens.shape[0]
        if begin is None:
            raise InvalidArgumentError("the plan was made with kv_begin; give it to the metadata too")
        if begin.shape != (num_sequences,) or begin.dtype != torch.int32:
            raise InvalidArgumentError(
                f"kv_begin must be [{num_sequences}] int32, one per seq_lens entry; "
                f"got {list(begin.shape)} {begin.dtype}"
            )
        if begin.device != self.seq_lens.device:
            raise InvalidArgumentError(
                f"kv_begin is on {begin.device}, seq_lens on {self.seq_lens.device}; move one"
            )
        if begin.is_cpu and num_sequences and int(begin.min()) < 0:
            raise InvalidArgumentError(f"kv_begin must not be negative, got {int(begin.min())}")
        if self.work is None:
            return
        planned = None if self.plan is None else self.plan.kv_begin
        if planned is None:
            raise InvalidArgumentError(
                "sequences with kv_begin cannot share keys: leave work None, or plan by "
                "ForestPlan.flat(..., kv_begin=...)"
            )
        if begin.is_cpu and not np.array_equal(planned, begin.numpy()):
            raise InvalidArgumentError(
                "the plan is of another step: it was made for another kv_begin; make a plan for each step"
            )


def _check_vector(name: str, size: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dim() != 1 or tensor.dtype not in dtypes:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InvalidArgumentError(
            f"{name} must be [{size}] {kinds}; got {list(tensor.shape)} {tensor.dtype}"
        )
