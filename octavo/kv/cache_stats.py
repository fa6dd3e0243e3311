"""Counters of a block pool and its prefix cache."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStats:
    """What the pool's blocks are doing, and what the prefix cache has saved.

        num_blocks = num_free + num_cached + num_referenced

    In a cache of several groups of layers, blocks are pages, whichever group they serve.

    Attributes:
        num_blocks: blocks of the cache.
        num_free: blocks whose contents cannot be hit.
        num_cached: unreferenced blocks that can still be hit.
        num_shared: blocks in more than one block table.
        num_table_entries: lengths of all block tables together: the blocks that a copy for each sequence
            would take.
        reserved_unfilled_tokens: fragmentation: slots of referenced blocks that hold no token yet, in layers
            with all keys, if there are such.
        prefix_query_tokens: tokens that prefix lookups could have found, repeated lookups included.
        prefix_hit_tokens: tokens that they found.
        prefix_lost_tokens: tokens that layers with all keys had besides, but not the windows behind them.
        num_evictions: cached blocks lost to new allocations.
        block_size: tokens per block; in a cache of several groups, those that a page holds of layers with
            all keys, or else of windows.
        bytes_per_block: keys and values of one block or page; 0 if the manager does not know it.
    """

    num_blocks: int
    num_free: int
    num_cached: int
    num_shared: int
    num_table_entries: int
    reserved_unfilled_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prefix_lost_tokens: int
    num_evictions: int
    block_size: int
    bytes_per_block: int

    @property
    def num_referenced(self) -> int:
        """Blocks in at least one block table."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def reserved_unfilled_bytes(self) -> int:
        """Fragmentation in bytes of keys and values, all layers."""
        return self.reserved_unfilled_tokens * self.bytes_per_block // self.block_size

    @property
    def referenced_bytes(self) -> int:
        """Bytes of the blocks in at least one block table."""
        return self.num_referenced * self.bytes_per_block

    @property
    def shared_bytes(self) -> int:
        """Bytes of the blocks in more than one block table, each counted once."""
        return self.num_shared * self.bytes_per_block

    @property
    def saved_bytes(self) -> int:
        """Bytes that sharing saves: a copy of each block for each of its sequences would take them on top."""
        return (self.num_table_entries - self.num_referenced) * self.bytes_per_block

    @property
    def cached_bytes(self) -> int:
        """Bytes of the unreferenced blocks that can still be hit."""
        return self.num_cached * self.bytes_per_block

    @property
    def free_bytes(self) -> int:
        """Bytes of the blocks whose contents cannot be hit."""
        return self.num_free * self.bytes_per_block

    @property
    def hit_rate(self) -> float:
        """Share of looked-up tokens that were found, 0 .. 1; 0 before the first lookup."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0

    @property
    def usage(self) -> float:
        """Share of the blocks that are referenced, 0 .. 1."""
        return self.num_referenced / self.num_blocks
