"""Block bookkeeping of a paged KV cache: NumPy and the standard library only, usable alone.

| to do | take |
|---|---|
| page a cache for your own model loop | `PagedSequences` |
| schedule an engine | `KVCacheManager`, `SequenceBlocks` |
| keep windows, or heads of several shapes, in one arena | `CacheLayer`, `plan_layout` |
| feed an attention kernel | `BlockTables`, `slot_mapping`, `last_position`, `next_position` |
| look inside | `KVStats`, `BlockPool`, `PrefixTree` |
"""

from octavo.kv.block_pool import BlockPool
from octavo.kv.block_tables import BlockTables
from octavo.kv.cache_layers import CacheLayer
from octavo.kv.cache_layout import CacheGroup, CacheLayout, plan_layout
from octavo.kv.cache_stats import KVStats
from octavo.kv.manager import KVCacheManager
from octavo.kv.paged_sequences import Extension, PagedSequences
from octavo.kv.prefix_tree import PrefixTree
from octavo.kv.sequence_blocks import BlockHash, BlockKey, SequenceBlocks, WindowBlocks, hash_block
from octavo.kv.slots import last_position, next_position, num_blocks_for, slot_mapping

__all__ = [
    "BlockHash",
    "BlockKey",
    "BlockPool",
    "BlockTables",
    "CacheGroup",
    "CacheLayer",
    "CacheLayout",
    "Extension",
    "KVCacheManager",
    "KVStats",
    "PagedSequences",
    "PrefixTree",
    "SequenceBlocks",
    "WindowBlocks",
    "hash_block",
    "last_position",
    "next_position",
    "num_blocks_for",
    "plan_layout",
    "slot_mapping",
]
