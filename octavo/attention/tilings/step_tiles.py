"""Which tilings serve the layers of a task map, and in how many parts keys are read."""

from dataclasses import dataclass

import torch

from octavo.attention.float8 import FLOAT8
from octavo.attention.implementations import decode_tile, prompt_tile, whole_unit_programs
from octavo.attention.tilings import portable as shapes
from octavo.attention.tilings.portable import TileShape, padded_head_dim

# Splitting a fat unit into parts with fewer keys would cost more than it saves.
_MIN_SPLIT_KEYS = 512
_MOST_PARTS = 256


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

    def thin_tile(self, num_sequences: int, *, shares: bool) -> TileShape:
        """Return the tiling for few query tokens; shares: see choice.decode_tile."""
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
        return shapes.thin_shape(self.group, self._padded_dim, self.cache_dtype)

    def portable_tile(self) -> TileShape:
        """Return the tiling for many query tokens whose keys may be read in parts."""
        return shapes.fat_shape(self.group, self._padded_dim, self._product_dtype)

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
        return shapes.deterministic_shape(self.group, self._padded_dim, self._product_dtype)

    def num_parts(self, tile: TileShape, num_units: int, max_seq_len: int, num_splits: int) -> int:
        """Return how many programs share the keys of a fat unit; num_splits: see plan_step."""
        if num_splits > 0:
            # More parts than tiles would be empty.
            return min(num_splits, max(1, -(-max_seq_len // tile.keys)), _MOST_PARTS)
        most_programs = whole_unit_programs(
            self.device, self.head_dim, self.cache_dtype, self._known_block_size, tile
        )
        most_parts = min(most_programs // (num_units * self.num_kv_heads), -(-max_seq_len // _MIN_SPLIT_KEYS))
        # A power of two, because each value is compiled separately.
        return 1 << max(0, most_parts.bit_length() - 1)

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
