"""A forest of shared prefixes on the device: what the GPU kernels read of a plan, and its partial results."""

import numpy as np
import torch

from octavo.attention.float8 import FLOAT8
from octavo.attention.node_plan import NodeCapacity, NodePlan, NodeTiling
from octavo.attention.prefix_forest import Costs
from octavo.attention.triton_shapes import (
    HOPPER_NODE_SHAPE,
    TileShape,
    fits_hopper,
    node_shape,
    num_multiprocessors,
    padded_head_dim,
    thin_shape,
)
from octavo.errors import InvalidArgumentError

# Keys and values of one head that a Hopper GPU reads while a program attends to one key of a fat tile.
_READS_PER_FAT_KEY = 100
# What three more launches cost, in bytes that the GPU reads meanwhile.
_LAUNCH_BYTES = 24 << 20


class DeviceForest:
    """Plans of shared prefixes on the device, in buffers allocated once, so that CUDA graphs can read them.

    Use, by an engine whose batch has a fixed row for each sequence while it runs:

        forest = DeviceForest(max_num_seqs=256, num_heads=16, num_kv_heads=8, head_dim=128, ...)
        when sequences join or leave:   plan = forest.plan(block_tables, seq_lens, cu_seqlens_q)
                                        forest.upload(plan)
        each step, if plan.num_units:   replay a graph captured with AttentionMetadata(..., forest=forest)
        each step, if not:              replay a graph captured without a forest

    A captured graph serves any plan: the kernels' grids do not depend on it. An uploaded plan stays right
    while sequences grow, and while rows die: a row with seq_len 0 gets 0 and -inf. It becomes wrong when
    a row is given to another sequence, so upload a new plan before the first step of a sequence that joins.

    A plan speaks of query tokens by their row of q; while each sequence decodes one token, that is its row.

    Attributes:
        thin_shape, fat_shape: tilings of nodes with few and with many query tokens.
        block_size: tokens in a block.
        counts: [4] int32: thin and fat units of the plan, programs for fat ones, multiprocessors for leaves.
        fat_counts: [2] int32, the two in the middle.
        leaf_multiprocessors: [1] int32, the last of them.
        thin_units, fat_units: [max_units, 8] int32 records, see NodePlan.
        tokens, slots: [max_partials] int32.
        merge_begin: [max_num_tokens + 1] int32.
        leaf_begin: [max_num_seqs] int32.
        block_ids: [max_blocks] int32.
        node_table: [max_blocks, 1] int32, the same as a block table whose rows begin anywhere.
        partial_out: [max_partials, H, D] float32, results of nodes; each layer writes them anew.
        partial_lse: [max_partials, H] float32, natural log.
        leaf_out: [max_num_tokens, H, D] float32, results of the tokens' own keys, likewise.
        leaf_lse: [max_num_tokens, H] float32.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        max_num_tokens: int | None = None,
        max_units: int = 1024,
        max_partials: int | None = None,
        max_blocks: int = 16384,
        thin: TileShape | None = None,
        fat: TileShape | None = None,
        min_segment_tokens: int = 256,
    ) -> None:
        """Allocate the buffers; the plan is empty until the first upload.

        Args:
            max_num_seqs: largest batch.
            num_heads: H of the layers.
            num_kv_heads: KH.
            head_dim: D.
            block_size: tokens in a block of the cache.
            dtype: of the cache.
            device: where the kernels run.
            max_num_tokens: most query tokens of a step; None: one per sequence.
            max_units: most units of each class in a plan.
            max_partials: most partial results of a plan, H * D float32 each; None: 16 per sequence
                and one per query token.
            max_blocks: most blocks of all nodes of a plan.
            thin, fat: tilings; None: what measured best.
            min_segment_tokens: nodes are not cut into segments shorter than this.
        """
        self.device = torch.device(device)
        self.heads = (num_heads, num_kv_heads, head_dim)
        self.block_size = block_size
        group = num_heads // num_kv_heads
        padded_dim = padded_head_dim(head_dim)
        self.thin_shape = thin or thin_shape(group, padded_dim, dtype)
        on_hopper = fits_hopper(self.device, dtype, head_dim=head_dim, block_size=block_size)
        if fat is None and on_hopper and group <= HOPPER_NODE_SHAPE.rows:
            fat = HOPPER_NODE_SHAPE
        self.fat_shape = fat or node_shape(group, padded_dim, torch.float16 if dtype == FLOAT8 else dtype)
        self.tiling = NodeTiling(
            thin_tokens=self.thin_shape.rows // group,
            fat_tokens=self.fat_shape.rows // group,
            thin_programs=self.num_programs(self.thin_shape),
            fat_programs=self.num_programs(self.fat_shape),
            num_kv_heads=num_kv_heads,
            align_tokens=max(self.thin_shape.keys, self.fat_shape.keys),
            min_segment_tokens=min_segment_tokens,
            reads_per_fat_key=_READS_PER_FAT_KEY if self.fat_shape == HOPPER_NODE_SHAPE else 0,
        )
        num_tokens = max_num_tokens or max_num_seqs
        self.capacity = NodeCapacity(
            num_tokens,
            max_num_seqs,
            max_units,
            max_partials or _max_partials(max_num_seqs, num_tokens),
            max_blocks,
        )
        # A partial result of one head is written and read in float32, mostly in the L2 cache.
        self.costs = Costs(partial_tokens=4 * group, node_tokens=64, tile_tokens=self.tiling.fat_tokens)
        self._min_saved_tokens = _LAUNCH_BYTES // (2 * num_kv_heads * head_dim * dtype.itemsize)
        self._allocate(num_heads, head_dim)

    @staticmethod
    def nbytes(*, max_num_seqs: int, max_num_tokens: int, num_heads: int, head_dim: int) -> int:
        """Return the bytes of a forest's partial results, all but a small part of its memory."""
        num_results = _max_partials(max_num_seqs, max_num_tokens) + max_num_tokens
        return num_results * num_heads * (head_dim + 1) * 4

    def _allocate(self, num_heads: int, head_dim: int) -> None:
        capacity = self.capacity
        sizes = {
            "counts": 4,
            "thin_units": 8 * capacity.num_units,
            "fat_units": 8 * capacity.num_units,
            "tokens": capacity.num_partials,
            "slots": capacity.num_partials,
            "merge_begin": capacity.num_tokens + 1,
            "leaf_begin": capacity.num_sequences,
            "block_ids": capacity.num_blocks,
        }
        # Fields of one buffer, each from a multiple of 16 bytes on.
        bounds = np.cumsum([0, *(-(-size // 4) * 4 for size in sizes.values())]).tolist()
        self._fields = {
            name: slice(begin, begin + size)
            for (name, size), begin in zip(sizes.items(), bounds, strict=False)
        }
        self._data = torch.zeros(bounds[-1], dtype=torch.int32, device=self.device)
        self.counts = self._data[self._fields["counts"]]
        self.fat_counts = self.counts[1:3]
        self.leaf_multiprocessors = self.counts[3:]
        self.thin_units = self._data[self._fields["thin_units"]].view(-1, 8)
        self.fat_units = self._data[self._fields["fat_units"]].view(-1, 8)
        self.tokens = self._data[self._fields["tokens"]]
        self.slots = self._data[self._fields["slots"]]
        self.merge_begin = self._data[self._fields["merge_begin"]]
        self.leaf_begin = self._data[self._fields["leaf_begin"]]
        self.block_ids = self._data[self._fields["block_ids"]]
        self.node_table = self.block_ids.unsqueeze(1)
        partial_shape = (capacity.num_partials, num_heads, head_dim)
        self.partial_out = torch.empty(partial_shape, dtype=torch.float32, device=self.device)
        self.partial_lse = torch.empty(partial_shape[:2], dtype=torch.float32, device=self.device)
        leaf_shape = (capacity.num_tokens, num_heads, head_dim)
        self.leaf_out = torch.empty(leaf_shape, dtype=torch.float32, device=self.device)
        self.leaf_lse = torch.empty(leaf_shape[:2], dtype=torch.float32, device=self.device)

    def num_programs(self, shape: TileShape) -> int:
        """Return how many programs of a tiling run side by side."""
        return num_multiprocessors(self.device) * shape.programs_per_multiprocessor

    def plan(
        self,
        block_tables: np.ndarray,
        seq_lens: np.ndarray,
        cu_seqlens_q: np.ndarray,
        *,
        always: bool = False,
    ) -> NodePlan:
        """Plan a step for these buffers, on the host.

        Args:
            block_tables: [S, max_blocks] int32; entries past a sequence's last block are never read.
            seq_lens: [S] int32, tokens in the cache, the query tokens included; 0 for an empty row.
            cu_seqlens_q: [S + 1] int32, cumulative query lengths.
            always: share whatever is shared, even where it does not pay.

        Raises:
            InvalidArgumentError: the step has more tokens or sequences than the forest was made for.
        """
        return NodePlan.from_block_tables(
            block_tables,
            seq_lens,
            cu_seqlens_q,
            self.block_size,
            tiling=self.tiling,
            costs=Costs(0.0, 0.0, self.costs.tile_tokens) if always else self.costs,
            capacity=self.capacity,
            min_saved_tokens=0 if always else self._min_saved_tokens,
        )

    def upload(self, plan: NodePlan) -> None:
        """Make a plan the one that kernels launched on the current stream from now on follow.

        One copy, which nothing waits for. Its pinned memory is new: PyTorch reuses it when the copy is done.

        Raises:
            InvalidArgumentError: the plan does not fit the buffers.
        """
        if not plan.fits(self.capacity):
            raise InvalidArgumentError(
                f"the plan does not fit a forest of {self.capacity}; make it by plan()"
            )
        host = torch.zeros(self._data.shape[0], dtype=torch.int32, pin_memory=self.device.type == "cuda")
        num_thin, num_fat = plan.thin_units.shape[0], plan.fat_units.shape[0]
        values = {
            "counts": [num_thin, num_fat, plan.num_fat_programs, self._num_leaf_multiprocessors(plan)],
            "thin_units": plan.thin_units.ravel(),
            "fat_units": plan.fat_units.ravel(),
            "tokens": plan.tokens,
            "slots": plan.slots,
            "merge_begin": plan.merge_begin,
            "leaf_begin": plan.leaf_begin,
            "block_ids": plan.block_ids,
        }
        array = host.numpy()
        # Tokens behind the plan's have no partial results.
        array[self._fields["merge_begin"]] = plan.num_partials
        for name, value in values.items():
            begin = self._fields[name].start
            array[begin : begin + len(value)] = value
        self._data.copy_(host, non_blocking=True)

    def _num_leaf_multiprocessors(self, plan: NodePlan) -> int:
        """Leaves that begin beside fat units get what these leave, if that is half of the GPU, which reads as
        fast as all of it; with room to spare, since a program that finds none starts when the others end.
        """
        num_all, num_taken = num_multiprocessors(self.device), plan.num_fat_programs
        if self.tiling.reads_per_fat_key and plan.fat_units.shape[0] and 2 * num_taken <= num_all:
            return (num_all - num_taken) * 7 // 8
        return num_all

    def check_step(
        self, heads: tuple[int, int, int], num_tokens: int, num_sequences: int, tile_keys: int
    ) -> None:
        """Check that a step's kernels can follow the plan: they do so without looking.

        Args:
            heads: (H, KH, D) of the layer.
            num_tokens: T, rows of q.
            num_sequences: S, rows of the block table.
            tile_keys: keys of a tile where the sequences' own parts are read.

        Raises:
            InvalidArgumentError: they cannot.
        """
        if heads != self.heads:
            raise InvalidArgumentError(
                f"the forest is for (H, KH, D) = {self.heads}, the layer has {heads}; make one for each"
            )
        if num_tokens > self.capacity.num_tokens or num_sequences > self.capacity.num_sequences:
            raise InvalidArgumentError(
                f"the forest is for {self.capacity.num_sequences} sequences and {self.capacity.num_tokens} "
                f"query tokens, the step has {num_sequences} and {num_tokens}; make a larger one"
            )
        if self.tiling.align_tokens % tile_keys:
            raise InvalidArgumentError(
                f"shared nodes end at multiples of {self.tiling.align_tokens} keys, which tiles of "
                f"{tile_keys} do not divide; use the same tiles for both"
            )


def _max_partials(max_num_seqs: int, max_num_tokens: int) -> int:
    """Levels times segments of a decoding sequence seldom exceed 16; a prompt's token has one at least."""
    return 16 * max_num_seqs + max_num_tokens
