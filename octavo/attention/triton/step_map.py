"""Makes a step's task map on the device: which queries read which keys, and how programs divide the work.

A unit is a tile of one sequence's query tokens and the keys they see. Units with few rows (decoding) are
thin, the others are fat. Each class has its own kernel: a single kernel would need the registers of the
larger. Nothing here waits for the device, so a CUDA graph can contain the launches that make a map. units.py
describes the records, work.py what a map holds.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.attention.choice import decode_tile, prompt_tile, whole_unit_programs
from octavo.attention.float8 import FLOAT8
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.options import ScoreOptions
from octavo.attention.triton import shapes
from octavo.attention.triton.shapes import TileShape, fat_shape, padded_head_dim
from octavo.attention.triton.units import RECORD, list_units_kernel, schedule_kernel
from octavo.attention.triton.work import FatWork, StepMap, ThinWork
from octavo.gpu.device import num_multiprocessors, power_of_two
from octavo.gpu.launch import launch

# One warp merges the pieces of a thin unit, at more than a microsecond each.
MOST_PIECES = 16
# Splitting a fat unit into parts with fewer keys would cost more than it saves.
_MIN_SPLIT_KEYS = 512
_MOST_PARTS = 256


@dataclass(frozen=True, slots=True)
class _Visibility:
    """Limits of the keys that a unit sees.

    Attributes:
        options: of the layers; only window and right are read.
        positions: [T] int32, to be written where they are shifted.
        leaf_begin: [S] int32 tokens that nodes cover, or None.
        leaves_begin_at: see FatWork.
    """

    options: ScoreOptions
    positions: Tensor
    leaf_begin: Tensor | None = None
    leaves_begin_at: int = 0


@dataclass(frozen=True, slots=True)
class _Layers:
    """The shapes and dtypes of the layers that use a map, and the tilings that are fastest for them.

    Attributes:
        num_heads: H.
        num_kv_heads: KH.
        head_dim: D.
        value_dim: Dv.
        dtype: of queries.
        cache_dtype: of keys and values.
        block_size: tokens in a block of the cache; 1: unknown.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    def thin_tile(self, seq_lens: Tensor, *, shares: bool) -> TileShape:
        """Return the tiling for few query tokens; shares: see choice.decode_tile."""
        return decode_tile(
            seq_lens.device,
            self.group,
            max(self.head_dim, self.value_dim),
            self.cache_dtype,
            self._known_block_size,
            num_sequences=seq_lens.shape[0],
            shares=shares,
        )

    def fat_tile(self, metadata: AttentionMetadata, num_tokens: int, num_splits: int) -> TileShape:
        """Return the tiling for many query tokens."""
        portable = fat_shape(self.group, self._padded_dim, self._product_dtype)
        if self.num_parts(portable, metadata, num_tokens, num_splits) > 1:
            return portable
        return prompt_tile(
            metadata.seq_lens.device,
            self.group,
            self.head_dim,
            self.cache_dtype,
            self._known_block_size,
            num_rows=num_tokens * self.num_heads,
            portable=portable,
        )

    def split_tile(self) -> TileShape:
        """Return the tiling for few query tokens whose keys are read in parts."""
        return shapes.thin_shape(self.group, self._padded_dim, self.cache_dtype)

    def deterministic_tile(self) -> TileShape:
        """Return the only tiling of a deterministic step."""
        return shapes.deterministic_shape(self.group, self._padded_dim, self._product_dtype)

    def num_parts(
        self, tile: TileShape, metadata: AttentionMetadata, num_tokens: int, num_splits: int
    ) -> int:
        """Return how many programs share the keys of a fat unit; num_splits: see plan_step."""
        device, block_size = metadata.seq_lens.device, self._known_block_size
        most_programs = whole_unit_programs(device, self.head_dim, self.cache_dtype, block_size, tile)
        # Counted by tokens, because a captured step has room for many sequences, most of which are empty.
        num_items = (num_tokens // (tile.rows // self.group) + 1) * self.num_kv_heads
        return count_parts(tile, most_programs, num_items, metadata.max_seq_len, num_splits)

    @property
    def _known_block_size(self) -> int:
        # Hopper's kernels need keys and values of one head dim; 1 is no block size that they support.
        return self.block_size if self.value_dim == self.head_dim else 1

    @property
    def _padded_dim(self) -> int:
        return padded_head_dim(max(self.head_dim, self.value_dim))

    @property
    def _product_dtype(self) -> torch.dtype:
        return torch.float16 if self.cache_dtype == FLOAT8 else self.dtype


def plan_step(
    metadata: AttentionMetadata,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 1,
    window: int | None = None,
    thin: TileShape | None = None,
    fat: TileShape | None = None,
    deterministic: bool = False,
    right: int | None = 0,
    num_splits: int = 0,
    value_dim: int | None = None,
) -> StepMap:
    """Make a step's task map on the device, without waiting for it.

    Args:
        metadata: the step; layers without a window use its forest.
        num_tokens: T, rows of q.
        num_heads: H.
        num_kv_heads: KH.
        head_dim: D.
        dtype: of queries.
        cache_dtype: None: that of the queries.
        block_size: tokens in a block of the cache; 1: unknown.
        window: of the layers that will use the map.
        thin, fat: tilings; None: the fastest measured.
        deterministic: no bit of a token's result may depend on the other tokens of the step. Then all units
            are fat, no keys are split or shared, and tokens of q that belong to no sequence get no result.
        right: of the layers, see ScoreOptions.
        num_splits: parts into which a query's keys are split; 0: the fastest.
        value_dim: Dv; None: D.

    Returns:
        The map. Calls that use it must run one after another, because they share its buffers.

    Raises:
        InvalidArgumentError: the forest is for other heads or fewer tokens.
    """
    layers = _Layers(
        num_heads, num_kv_heads, head_dim, value_dim or head_dim, dtype, cache_dtype or dtype, block_size
    )
    positions = metadata.positions if right == 0 else torch.empty_like(metadata.positions)
    see = _Visibility(ScoreOptions(1.0, window, right=right), positions)
    if deterministic:
        work = _invariant_work(fat or layers.deterministic_tile(), metadata, layers.group, num_tokens, see)
        return StepMap(None, work, window, None, right, positions)
    forest = metadata.forest if window is None else None
    thin = thin or layers.thin_tile(metadata.seq_lens, shares=forest is not None)
    fat = fat or layers.fat_tile(metadata, num_tokens, num_splits)
    if forest is not None:
        num_sequences, tile_keys = metadata.seq_lens.shape[0], max(thin.keys, fat.keys)
        forest.check_step((num_heads, num_kv_heads, head_dim), num_tokens, num_sequences, tile_keys)
        see = replace(see, leaf_begin=forest.leaf_begin, leaves_begin_at=forest.align_tokens)
    max_thin_tokens = thin.rows // layers.group
    has_fat = metadata.max_query_len > max_thin_tokens
    if num_splits > 0:
        tile = fat if has_fat else layers.split_tile()
        work = _fat_work(tile, metadata, layers, num_tokens, 0, see, num_splits)
        return StepMap(None, work, window, forest, right, positions, covers_all=False)
    thin_work, fat_work = _thin_work(thin, metadata, layers, see), None
    if has_fat:
        fat_work = _fat_work(fat, metadata, layers, num_tokens, max_thin_tokens, see)
    return StepMap(thin_work, fat_work, window, forest, right, positions)


def _thin_work(shape: TileShape, metadata: AttentionMetadata, layers: _Layers, see: _Visibility) -> ThinWork:
    num_units, device = metadata.seq_lens.shape[0], metadata.seq_lens.device
    tile_tokens = shape.rows // layers.group
    units, _ = _list_units(metadata, num_units, tile_tokens, 0, tile_tokens, see)
    num_programs = num_multiprocessors(device) * shape.programs_per_multiprocessor
    schedule = torch.empty(2 + num_programs, dtype=torch.int32, device=device)
    launch(
        schedule_kernel,
        (num_programs,),
        *(units, schedule, num_units, layers.num_kv_heads, shape.keys, power_of_two(num_units)),
        # A sequence that is alone is read fast only by all programs.
        MOST_PIECES if num_units > 1 else num_programs,
    )
    arrivals = torch.zeros(num_units, layers.num_kv_heads, dtype=torch.int32, device=device)
    return ThinWork.allocate(shape, units, schedule, arrivals, layers.value_dim)


def _fat_work(
    shape: TileShape,
    metadata: AttentionMetadata,
    layers: _Layers,
    num_tokens: int,
    max_thin_tokens: int,
    see: _Visibility,
    num_splits: int = 0,
) -> FatWork:
    """Cut queries into units and their keys into parts."""
    tile_tokens = shape.rows // layers.group
    # A captured step has room for many sequences, but its tokens bound how many have over max_thin_tokens.
    most_sequences = min(metadata.seq_lens.shape[0], num_tokens // (max_thin_tokens + 1))
    num_units = num_tokens // tile_tokens + most_sequences
    units, count = _list_units(metadata, num_units, tile_tokens, max_thin_tokens, metadata.max_query_len, see)
    num_parts = layers.num_parts(shape, metadata, num_tokens, num_splits)
    results = (num_tokens, layers.num_heads, layers.value_dim)
    return FatWork.allocate(shape, units, count, num_parts, results, see.leaves_begin_at)


def count_parts(
    shape: TileShape, most_programs: int, num_items: int, max_seq_len: int, num_splits: int = 0
) -> int:
    """Return how many programs share the keys of each of num_items (unit, kv head)s.

    Args:
        most_programs: see choice.whole_unit_programs.
        others: see plan_step.
    """
    if num_splits > 0:
        # More parts than tiles would be empty.
        return min(num_splits, max(1, -(-max_seq_len // shape.keys)), _MOST_PARTS)
    most_parts = min(most_programs // num_items, -(-max_seq_len // _MIN_SPLIT_KEYS))
    # A power of two, because each value is compiled separately.
    return 1 << max(0, most_parts.bit_length() - 1)


def _invariant_work(
    shape: TileShape, metadata: AttentionMetadata, group: int, num_tokens: int, see: _Visibility
) -> FatWork:
    """Make a deterministic step's work: one tiling, and each program folds all keys of its unit in order.

    Then the other rows of a tile only change which keys are masked, and a masked key changes no bit. No tile
    is marked as fully visible, so that all keys take the masked loop: the other loop could round differently.
    """
    tile_tokens = shape.rows // group
    num_units = num_tokens // tile_tokens + metadata.seq_lens.shape[0]
    units, count = _list_units(metadata, num_units, tile_tokens, 0, metadata.max_query_len, see)
    units[:, 5:7].zero_()
    nothing = torch.empty(0, dtype=torch.float32, device=units.device)
    return FatWork(shape, units, count, 1, nothing, nothing, row_invariant=True)


def _list_units(
    metadata: AttentionMetadata,
    num_units: int,
    tile_tokens: int,
    above_tokens: int,
    max_tokens: int,
    see: _Visibility,
) -> tuple[Tensor, Tensor]:
    """List the units of sequences with above_tokens < query length <= max_tokens.

    Returns:
        ([num_units, 8] records, [1] how many are used), int32.
    """
    num_sequences, options, device = metadata.seq_lens.shape[0], see.options, metadata.seq_lens.device
    shifts = (see.positions, options.shift) if options.right != 0 else (None, None)
    units = torch.empty(num_units, RECORD.value, dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    launch(
        list_units_kernel,
        (num_sequences,),
        *(units, count, metadata.cu_seqlens_q, metadata.seq_lens, metadata.positions, see.leaf_begin),
        *(metadata.kv_begin, *shifts),
        *(num_sequences, num_units, above_tokens, max_tokens, options.shifted_window or 0),
        *(tile_tokens, power_of_two(tile_tokens), power_of_two(num_sequences)),
    )
    return units, count
