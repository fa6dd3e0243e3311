"""A forest of shared prefixes on the device: a NodePlan in device memory, and its partial results."""

from math import lcm

import numpy as np
import torch

from octavo.attention.plan.node_plan import NodeCapacity, NodePlan, NodeTiling
from octavo.attention.plan.prefix_forest import Costs
from octavo.attention.plan.window_forest import check_window
from octavo.attention.tilings.portable import TileShape, decode_shape, padded_head_dim
from octavo.attention.tilings.step_tiles import node_tiles
from octavo.errors import InvalidArgumentError
from octavo.kernels.device import num_multiprocessors

# Measured cost of the additional launches, in bytes that the GPU could read in that time. Some of these reads
# hit the L2 cache, because neighbouring sequences read the same blocks.
_LAUNCH_BYTES = 80 << 20


class DeviceForest:
    """Plans of shared prefixes in device buffers that are allocated once, so that CUDA graphs can read them.

    Use by an engine that gives each sequence a fixed row of the batch:

        forest = DeviceForest(max_num_seqs=256, num_heads=16, num_kv_heads=8, head_dim=128, ...)
        when sequences join or leave:   plan = forest.plan(block_tables, seq_lens, cu_seqlens_q)
                                        forest.upload(plan)
        each step, if plan.num_units:   replay a graph captured with AttentionMetadata(..., work=forest)
        each step, if not:              replay a graph captured without a forest

    A captured graph serves any plan: the kernels' grids do not depend on it. An uploaded plan stays valid
    while sequences grow, and when they end: a row with seq_len 0 gets output 0 and lse -inf. It becomes
    invalid when a row is given to another sequence, so upload a new plan before that sequence's first step.

    A plan names query tokens by their row of q. If each sequence decodes one token, that is its row of the
    batch. On Hopper GPUs, a plan made for max_query_len 1 has smaller tiles than one for longer queries. Use
    it only in steps of its kind.

    The plan is empty until the first upload.

    Args:
        max_num_seqs: largest batch.
        num_heads, num_kv_heads, head_dim: H, KH, D of the layers.
        block_size, dtype: of the cache.
        device: where the kernels run.
        max_num_tokens: maximum query tokens of a step; None: one per sequence.
        max_units: maximum units of each class in a plan.
        max_partials: maximum partial results of a plan, H * D float32 each; None: 16 per sequence and one
            per query token.
        max_blocks: maximum blocks of all nodes of a plan.
        thin, fat: tilings; None: the fastest measured.
        min_segment_tokens: minimum length of a segment.
        window: of the layers; None: they have none. As windows move on, kernels read less of a plan's nodes.
        beside: a forest of other layers of the same network. Layers run one after another, so both share the
            memory of results if they have the same heads and capacity.

    Attributes:
        thin_shape: tiling of nodes with few query tokens; fat_tile() is that of nodes with many.
        has_thin_units: whether a plan can have thin units; see node_tiles.
        block_size: tokens in a block.
        num_thin_units, num_fat_units: [1] int32 each, of the plan.
        thin_units, fat_units: [max_units, 8] int32 records, see NodePlan.
        tokens, partial_ids: [max_partials] int32.
        merge_begin: [max_num_tokens + 1] int32.
        leaf_begin: [max_num_seqs] int32.
        block_ids: [max_blocks] int32.
        node_table: [max_blocks, 1] int32, a view of block_ids as a block table whose rows begin at any entry.
        partial_out: [max_partials, H, D] float32, results of nodes; each layer overwrites them.
        partial_lse: [max_partials, H] float32, natural log.
        leaf_out: [max_num_tokens, H, D] float32, results of the tokens' own keys; each layer overwrites them.
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
        window: int | None = None,
        beside: "DeviceForest | None" = None,
    ) -> None:
        self.device = torch.device(device)
        self.heads = (num_heads, num_kv_heads, head_dim)
        self.block_size = block_size
        check_window(window)
        self.window = window
        self._group = group = num_heads // num_kv_heads
        self.thin_shape = thin or decode_shape(group, padded_head_dim(head_dim), dtype, device=self.device)
        if fat is None:
            *fat_tiles, has_thin_units = node_tiles(self.device, group, head_dim, dtype, block_size)
        else:
            fat_tiles, has_thin_units = [fat, fat], True
        self._fat_tiles = tuple(fat_tiles)
        self.has_thin_units = has_thin_units
        self._min_segment_tokens = min_segment_tokens
        num_tokens = max_num_tokens or max_num_seqs
        self.capacity = NodeCapacity(
            num_tokens,
            max_num_seqs,
            max_units,
            max_partials or _max_partials(max_num_seqs, num_tokens),
            max_blocks,
        )
        self._min_saved_tokens = _LAUNCH_BYTES // (2 * num_kv_heads * head_dim * dtype.itemsize)
        self._allocate_plan()
        self._allocate_results(beside)

    @staticmethod
    def nbytes(*, max_num_seqs: int, max_num_tokens: int, num_heads: int, head_dim: int) -> int:
        """Return the bytes of a forest's partial results, which are nearly all of its memory."""
        num_results = _max_partials(max_num_seqs, max_num_tokens) + max_num_tokens
        return num_results * num_heads * (head_dim + 1) * 4

    def _allocate_plan(self) -> None:
        capacity = self.capacity
        sizes = {
            "num_thin_units": 1,
            "num_fat_units": 1,
            "thin_units": 8 * capacity.num_units,
            "fat_units": 8 * capacity.num_units,
            "tokens": capacity.num_partials,
            "partial_ids": capacity.num_partials,
            "merge_begin": capacity.num_tokens + 1,
            "leaf_begin": capacity.num_sequences,
            "block_ids": capacity.num_blocks,
        }
        # All fields lie in one buffer; each begins at a multiple of 16 bytes.
        bounds = np.cumsum([0, *(-(-size // 4) * 4 for size in sizes.values())]).tolist()
        self._fields = {
            name: slice(begin, begin + size)
            for (name, size), begin in zip(sizes.items(), bounds, strict=False)
        }
        self._data = torch.zeros(bounds[-1], dtype=torch.int32, device=self.device)
        views = [self._data[field] for field in self._fields.values()]
        self.num_thin_units, self.num_fat_units, thin_units, fat_units, *lists = views
        self.thin_units, self.fat_units = thin_units.view(-1, 8), fat_units.view(-1, 8)
        self.tokens, self.partial_ids, self.merge_begin, self.leaf_begin, self.block_ids = lists
        self.node_table = self.block_ids.unsqueeze(1)

    def _allocate_results(self, beside: "DeviceForest | None") -> None:
        if beside is not None and (beside.heads, beside.capacity) == (self.heads, self.capacity):
            self.partial_out, self.partial_lse = beside.partial_out, beside.partial_lse
            self.leaf_out, self.leaf_lse = beside.leaf_out, beside.leaf_lse
            return
        num_heads, _, head_dim = self.heads
        partial_shape = (self.capacity.num_partials, num_heads, head_dim)
        self.partial_out = torch.empty(partial_shape, dtype=torch.float32, device=self.device)
        self.partial_lse = torch.empty(partial_shape[:2], dtype=torch.float32, device=self.device)
        leaf_shape = (self.capacity.num_tokens, num_heads, head_dim)
        self.leaf_out = torch.empty(leaf_shape, dtype=torch.float32, device=self.device)
        self.leaf_lse = torch.empty(leaf_shape[:2], dtype=torch.float32, device=self.device)

    def fat_tile(self, *, decodes: bool) -> TileShape:
        """Return the tiling of nodes with many query tokens; decodes: no sequence has more than one token."""
        return self._fat_tiles[decodes]

    def tiling(self, *, decodes: bool) -> NodeTiling:
        """Return the limits for cutting nodes; decodes: see fat_tile."""
        _, num_kv_heads, _ = self.heads
        thin, fat = self.thin_shape, self.fat_tile(decodes=decodes)
        return NodeTiling(
            thin_tokens=thin.rows // self._group if self.has_thin_units else 0,
            fat_tokens=fat.rows // self._group,
            thin_programs=self.num_programs(thin),
            fat_programs=self.num_programs(fat),
            num_kv_heads=num_kv_heads,
            align_tokens=max(thin.keys, fat.keys),
            min_segment_tokens=self._min_segment_tokens,
        )

    def unsupported_reason(self, window: int | None) -> str | None:
        """Return why layers with a window, or without one (None), read their keys per sequence; or None."""
        if window == self.window:
            return None
        return f"the forest's nodes are cut for window={self.window}, these layers have window={window}"

    @property
    def most_unit_tokens(self) -> int:
        """No unit has more query tokens."""
        tiles = (*self._fat_tiles, *([self.thin_shape] if self.has_thin_units else []))
        return max(tile.rows for tile in tiles) // self._group

    @property
    def align_tokens(self) -> int:
        """Nodes end at multiples of so many tokens, beside prompts."""
        return lcm(self.block_size, self.tiling(decodes=False).align_tokens)

    def num_programs(self, shape: TileShape) -> int:
        """Return how many programs of a tiling run concurrently."""
        return num_multiprocessors(self.device) * shape.programs_per_multiprocessor

    def plan(
        self,
        block_tables: np.ndarray,
        seq_lens: np.ndarray,
        cu_seqlens_q: np.ndarray,
        *,
        always: bool = False,
    ) -> NodePlan:
        """Make a step's NodePlan for these buffers, on the host; arrays as for ForestPlan.from_block_tables.

        Args:
            always: share every common prefix, even where it costs more than it saves.

        Raises:
            InvalidArgumentError: the step has more tokens or sequences than the forest was made for.
        """
        tiling = self.tiling(decodes=bool(np.diff(cu_seqlens_q).max(initial=0) <= 1))
        # A partial result of one head is written and read in float32, mostly in the L2 cache.
        costs = Costs(partial_tokens=4 * self._group, node_tokens=64, tile_tokens=tiling.fat_tokens)
        return NodePlan.from_block_tables(
            block_tables,
            seq_lens,
            cu_seqlens_q,
            self.block_size,
            tiling=tiling,
            costs=Costs(0.0, 0.0, tiling.fat_tokens) if always else costs,
            capacity=self.capacity,
            min_saved_tokens=0 if always else self._min_saved_tokens,
            window=self.window,
        )

    def upload(self, plan: NodePlan) -> None:
        """Copy a plan to the device; kernels launched afterwards on the current stream follow it.

        Nothing waits for the copy. Its pinned memory is new: PyTorch reuses it only when the copy is done.

        Raises:
            InvalidArgumentError: the plan does not fit the buffers.
        """
        if not plan.fits(self.capacity):
            raise InvalidArgumentError(
                f"the plan does not fit a forest of {self.capacity}; make it by plan()"
            )
        is_pinned = self.device.type == "cuda"
        host = torch.zeros(self._data.shape[0], dtype=torch.int32, device="cpu", pin_memory=is_pinned)
        values = {
            "num_thin_units": [plan.thin_units.shape[0]],
            "num_fat_units": [plan.fat_units.shape[0]],
            "thin_units": plan.thin_units.ravel(),
            "fat_units": plan.fat_units.ravel(),
            "tokens": plan.tokens,
            "partial_ids": plan.partial_ids,
            "merge_begin": plan.merge_begin,
            "leaf_begin": plan.leaf_begin,
            "block_ids": plan.block_ids,
        }
        array = host.numpy()
        # Tokens after those of the plan have no partial results.
        array[self._fields["merge_begin"]] = plan.num_partials
        for name, value in values.items():
            begin = self._fields[name].start
            array[begin : begin + len(value)] = value
        self._data.copy_(host, non_blocking=True)

    def check_step(
        self, heads: tuple[int, int, int], num_tokens: int, num_sequences: int, tile_keys: int
    ) -> None:
        """Check that a step fits the forest; the kernels do not check it.

        Args:
            heads: (H, KH, D) of the layer.
            num_tokens: T, rows of q.
            num_sequences: S, rows of the block table.
            tile_keys: keys per tile of the leaves' kernels.

        Raises:
            InvalidArgumentError: it does not fit.
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
        align_tokens = self.tiling(decodes=False).align_tokens
        if align_tokens % tile_keys:
            raise InvalidArgumentError(
                f"shared nodes end at multiples of {align_tokens} keys, which tiles of {tile_keys} keys do "
                f"not divide; use the same tiles for both"
            )


def _max_partials(max_num_seqs: int, max_num_tokens: int) -> int:
    """Return a number that suffices for nearly all plans: 16 per decoding sequence, one per prompt token."""
    return 16 * max_num_seqs + max_num_tokens
