"""Paged attention: how a block is read and written. Knows nothing of requests; usable alone."""

from octavo.attention.cache import KVCache, LayerCache
from octavo.attention.implementations import available_impls
from octavo.attention.interface import (
    forest_attention,
    paged_attention,
    paged_attention_with_lse,
    store_kv,
    uniform_attention_with_lse,
)
from octavo.attention.merge import merge
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.plan.device_forest import DeviceForest
from octavo.attention.plan.host_plan import ForestPlan

__all__ = [
    "AttentionMetadata",
    "DeviceForest",
    "ForestPlan",
    "KVCache",
    "LayerCache",
    "available_impls",
    "forest_attention",
    "merge",
    "paged_attention",
    "paged_attention_with_lse",
    "store_kv",
    "uniform_attention_with_lse",
]
