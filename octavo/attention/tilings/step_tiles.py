"""Which tilings are taken for a step: for decoding, for prompts and for shared nodes, and how keys are split.

A Hopper kernel's tiling is taken where that kernel supports the cache, else the portable kernel's.
"""

from dataclasses import dataclass

import torch

from octavo.attention.cache import FLOAT8
from octavo.attention.tilings import hopper
from octavo.attention.tilings.portable import (
    TileShape,
    decode_shape,
    deterministic_shape,
    node_shape,
    padded_head_dim,
    prefill_shape,
)
from octavo.kernels.device import num_multiprocessors

# Splitting a prefill unit into parts with fewer keys would cost more than it saves.
_MIN_SPLIT_KEYS = 512
_MOST_PARTS = 256
# From this many sequences on, leaves that run beside nodes use smaller tiles.
_MANY_LEAVES = 128


@dataclass(frozen=True, slots=True)
class Layers:
    """The shapes and dtypes of the layers that use a map, and the tilings that are fastest for them.

    Attributes:
        num_heads: H.
        num_kv_heads: KH.
        head_dim: D.
        value_dim: Dv.
        dtype: of queries.
        cache_dtype: of keys and values.
        block_size: tokens in a block of the cache; 1: unknown.
        device: where they run.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int
    device: torch.device

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    def decode_tile(self, num_sequences: int, *, shares: bool) -> TileShape:
        """Return the tiling for few query tokens; shares: see decode_tile."""
        return decode_tile(
            self.device,
            self.group,
            max(self.head_dim, self.value_dim),
            self.cache_dtype,
            self._known_block_size,
            num_sequences=num_sequences,
            shares=shares,
        )

    def split_tile(self) -> TileShape:
        """Return the tiling for few query tokens whose keys are read in parts."""
        return decode_shape(self.group, self._padded_dim, self.cache_dtype, device=self.device)

    def portable_tile(self) -> TileShape:
        """Return the tiling for many query tokens whose keys may be read in parts."""
        return prefill_shape(self.group, self._padded_dim, self._product_dtype, self.device)

    def whole_tile(self, num_tokens: int) -> TileShape:
        """Return the tiling for many query tokens, num_tokens in all, whose keys are read in one part."""
        return prompt_tile(
            self.device,
            self.group,
            self.head_dim,
            self.cache_dtype,
            self._known_block_size,
            num_rows=num_tokens * self.num_heads,
            portable=self.portable_tile(),
        )

    def deterministic_tile(self) -> TileShape:
        """Return the only tiling of a deterministic step."""
        return deterministic_shape(self.group, self._padded_dim, self._product_dtype, self.device)

    def num_parts(self, tile: TileShape, num_units: int, max_seq_len: int, num_splits: int) -> int:
        """Return how many programs share the keys of a prefill unit; num_splits: see make_step_map."""
        if num_splits > 0:
            # More parts than tiles would be empty.
            return min(num_splits, max(1, -(-max_seq_len // tile.keys)), _MOST_PARTS)
        most_programs = self._whole_unit_programs(tile)
        most_parts = min(most_programs // (num_units * self.num_kv_heads), -(-max_seq_len // _MIN_SPLIT_KEYS))
        # The kernel is compiled for each number of parts, so only powers of two are used.
        return 1 << max(0, most_parts.bit_length() - 1)

    def _whole_unit_programs(self, tile: TileShape) -> int:
        """Return how many programs are enough to leave units whole; with fewer, units are cut into parts.

        Only the portable kernel takes parts. Hopper's kernel takes whole units, and is so much faster that a
        quarter of the SMs is enough.
        """
        num_resident = num_multiprocessors(self.device) * tile.programs_per_multiprocessor
        reason = hopper.unsupported_reason(
            self.device, self.cache_dtype, head_dim=self.head_dim, block_size=self._known_block_size
        )
        return num_resident if reason is not None else num_resident // 4

    @property
    def _known_block_size(self) -> int:
        # Hopper's kernels need keys and values of one head dim; they do not support the block size 1.
        return self.block_size if self.value_dim == self.head_dim else 1

    @property
    def _padded_dim(self) -> int:
        return padded_head_dim(max(self.head_dim, self.value_dim))

    @property
    def _product_dtype(self) -> torch.dtype:
        return torch.float16 if self.cache_dtype == FLOAT8 else self.dtype


def decode_tile(
    device: torch.device,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int,
    *,
    num_sequences: int,
    shares: bool,
) -> TileShape:
    """Return the tiling for decoding: that of the Hopper kernel if it supports the cache.

    Args:
        device: where the kernel runs.
        group: query heads per kv head.
        head_dim: D.
        dtype: of the cache.
        block_size: tokens in a block of the cache.
        num_sequences: S. A single sequence is split over all programs.
        shares: other kernels read the prefixes that the sequences share.
    """
    shape = hopper.DECODE_SHAPES.get(head_dim)
    if (
        num_sequences > 1
        and shape is not None
        and group <= shape.rows
        and hopper.unsupported_reason(device, dtype, head_dim=head_dim, block_size=block_size) is None
    ):
        if shares and shape == hopper.DECODE_SHAPE:
            return hopper.LEAF_SHAPE if num_sequences >= _MANY_LEAVES else hopper.FEW_LEAVES_SHAPE
        return shape
    return decode_shape(group, padded_head_dim(head_dim), dtype, is_alone=num_sequences == 1, device=device)


def prompt_tile(
    device: torch.device,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int,
    *,
    num_rows: int,
    portable: TileShape,
) -> TileShape:
    """Return the tiling that cuts prompts into units, if these are left whole; arguments as for decode_tile.

    Args:
        num_rows: query tokens times heads.
        portable: the tiling for the portable kernel, and for all but short prompts and wide heads.
    """
    reason = hopper.unsupported_reason(device, dtype, head_dim=head_dim, block_size=block_size)
    if reason is not None:
        return portable
    wide = hopper.WIDE_SHAPES.get(head_dim)
    if wide is not None:
        return wide if group <= wide.rows else portable
    return hopper.SHORT_SHAPE if hopper.is_short(device, group, num_rows) else portable


def node_tiles(
    device: torch.device, group: int, head_dim: int, dtype: torch.dtype, block_size: int
) -> tuple[TileShape, TileShape, bool]:
    """Return the tilings of shared nodes with many query tokens; arguments as for decode_tile.

    Returns:
        (tiling in steps with prompts, tiling in steps that only decode, whether nodes with few query tokens
        have a kernel of their own). On Hopper they need none: its kernel reads them at full memory bandwidth.
    """
    reason = hopper.unsupported_reason(device, dtype, head_dim=head_dim, block_size=block_size)
    if reason is None and group <= hopper.BESIDE_SHAPE.rows:
        wide = hopper.WIDE_SHAPES.get(head_dim)
        if wide is not None:
            return wide, wide, False
        return hopper.NODE_SHAPE, hopper.BESIDE_SHAPE, False
    product_dtype = torch.float16 if dtype == FLOAT8 else dtype
    tile = node_shape(group, padded_head_dim(head_dim), product_dtype, device)
    return tile, tile, True
