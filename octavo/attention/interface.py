"""The public operators of a paged KV cache: store keys and values, and attend. They check their arguments."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from octavo.attention import gpu_paged
from octavo.attention.cache import LayerCache
from octavo.attention.checks import (
    check_attention,
    check_forward_only,
    check_num_splits,
    check_store,
    check_uniform,
)
from octavo.attention.implementations import choose_for_call, choose_impl, implementations
from octavo.attention.lengths import check_lengths, concatenated_ranges
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.plan.device_forest import DeviceForest
from octavo.attention.plan.host_plan import ForestPlan
from octavo.attention.score_options import ScoreOptions
from octavo.attention.tilings.portable import MOST_UNIFORM


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor, *, impl: str = "auto") -> None:
    """Write each token's key and value to its slot of the cache, in place.

    Args:
        k: [T, KH, D] keys, last dimension contiguous, for example a view of a fused qkv. Their dtype is that
            of the cache; for a float8 (float8_e4m3fn) cache it is float32, bfloat16 or float16, and on a CPU
            float32 for a bfloat16 cache, too.
        v: [T, KH, Dv] values, like k.
        cache: one layer's cache, see KVCache.layer; written. A float8 cache with scales stores k / k_scale,
            saturated.
        slot_mapping: [T] int32 or int64, block id * B + offset; -1 writes nothing.
        impl: "auto" or one of available_impls().

    Raises:
        InvalidArgumentError: a shape, dtype or device does not fit, or (on a CPU) a slot does not exist.
        ConfigError: impl is unknown or cannot run here.
    """
    check_store(k, v, cache, slot_mapping)
    chosen = implementations[choose_for_call(impl, cache, k.dtype)]
    chosen.store_kv(k, v, cache, slot_mapping)


def paged_attention(
    q: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    right: int | None = 0,
    sinks: Tensor | None = None,
    num_splits: int = 0,
    impl: str = "auto",
) -> Tensor:
    """Return the first result of paged_attention_with_lse: [T, H, D], dtype of q."""
    return paged_attention_with_lse(
        q,
        cache,
        metadata,
        scale=scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        right=right,
        sinks=sinks,
        num_splits=num_splits,
        impl=impl,
    )[0]


def paged_attention_with_lse(
    q: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    right: int | None = 0,
    sinks: Tensor | None = None,
    num_splits: int = 0,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend each query token to its own sequence's keys in the cache.

    The token at position p sees the keys kv_begin <= j < seq_len with j <= p + right and, with a window,
    j > p - window. Query head h reads kv head h // (H / KH). A batch may mix prefill and decode; any block
    size and head dim.

    Args:
        q: [T, H, D] queries, any strides, last dimension contiguous; dtype as for k of store_kv.
        cache: one layer's cache, see KVCache.layer.
        metadata: the step. If it has no plan, the call makes one that shares nothing.
        scale: factor of q.k, usually 1 / sqrt(D).
        window: a token sees its last `window` keys, including itself; None: all.
        softcap: scores become softcap * tanh(score / softcap); 0: off.
        alibi_slopes: [H], or [S, H] for each sequence, float32; adds -slope * |p - j| to the scores.
        right: keys after its own position that a token sees; 0: causal, None: all.
        sinks: [H] floating scores of one more key, with the value 0, that every token sees; None: there is
            none.
        num_splits: on a GPU, how many parts a query's keys are read in, concurrently; 0: as many as are
            fastest, 1: one pass. It changes time and rounding only, and CPUs ignore it.
        impl: "auto" or one of available_impls().

    Returns:
        (out [T, H, Dv] in the dtype of q, lse [T, H] float32: natural log of the sum of exponentials).
        Where a token sees nothing, out is 0 and lse is -inf, or its sink.

    Raises:
        InvalidArgumentError: a shape, dtype, device, option or length does not fit, or (on a CPU) the block
            table names a block that does not exist.
        ConfigError: impl is unknown or cannot run here.
    """
    options = ScoreOptions(scale, window, softcap, alibi_slopes, right, sinks)
    check_num_splits(num_splits)
    check_attention(q, cache, metadata, options)
    chosen = choose_for_call(impl, cache, q.dtype, options)
    on_gpu = {"num_splits": num_splits} if chosen == "triton" else {}
    return implementations[chosen].paged_attention_with_lse(q, cache, metadata, options, **on_gpu)


def uniform_attention_with_lse(
    q: Tensor,
    cache: LayerCache,
    seq_lens: Tensor,
    block_table: Tensor,
    options: ScoreOptions,
    *,
    query_len: int,
    max_seq_len: int,
    kv_begin: Tensor | None = None,
    num_splits: int = 0,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend the last query_len tokens of each sequence to its keys; see paged_attention_with_lse.

    On a GPU the map of the work takes one launch, where paged_attention_with_lse takes three for a single
    layer. Nothing waits for the device.

    Args:
        q: [S * query_len, H, D] queries, sequence after sequence.
        cache: one layer's cache.
        seq_lens: [S] int32 or int64, end of each sequence's keys. Where it is less than query_len, the first
            queries have negative positions.
        block_table: [S, max_blocks] int32.
        options: of the scores.
        query_len: query tokens of each sequence.
        max_seq_len: no sequence is longer, such as what a row of the block table holds.
        kv_begin, num_splits: see AttentionMetadata and paged_attention_with_lse.
        impl: "auto" or one of available_impls().

    Returns:
        (out [S * query_len, H, Dv] in the dtype of q, lse [S * query_len, H] float32), as
        paged_attention_with_lse.

    Raises:
        InvalidArgumentError: a shape, dtype, device, option or length does not fit.
        ConfigError: impl is unknown or cannot run here.
    """
    check_num_splits(num_splits)
    check_uniform(q, cache, seq_lens, block_table, options, query_len, max_seq_len, kv_begin)
    chosen = choose_for_call(impl, cache, q.dtype, options)
    if chosen == "triton" and query_len > 0 and 1 <= seq_lens.shape[0] <= MOST_UNIFORM:
        return gpu_paged.uniform_attention_with_lse(
            q, cache, seq_lens, block_table, options, query_len=query_len, max_seq_len=max_seq_len,
            kv_begin=kv_begin, num_splits=num_splits,
        )  # fmt: skip
    metadata = _uniform_metadata(seq_lens, block_table, query_len, max_seq_len, kv_begin)
    check_attention(q, cache, metadata, options)
    on_gpu = {"num_splits": num_splits} if chosen == "triton" else {}
    return implementations[chosen].paged_attention_with_lse(q, cache, metadata, options, **on_gpu)


def _uniform_metadata(
    seq_lens: Tensor, block_table: Tensor, query_len: int, max_seq_len: int, kv_begin: Tensor | None
) -> AttentionMetadata:
    token = torch.arange(query_len, device=seq_lens.device)
    positions = (seq_lens.unsqueeze(1) - query_len + token).flatten().int()
    return AttentionMetadata(
        cu_seqlens_q=torch.arange(seq_lens.shape[0] + 1, device=seq_lens.device) * query_len,
        seq_lens=seq_lens,
        positions=positions,
        # Attention does not read it.
        slot_mapping=positions,
        block_table=block_table,
        max_query_len=query_len,
        max_seq_len=max_seq_len,
        kv_begin=kv_begin,
        may_be_short=True,
    )


def forest_attention(
    q: Tensor,
    cache: LayerCache,
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    cu_seqlens_q: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attend each query token to its sequence's keys, reading the blocks that sequences share only once.

    The queries are the last tokens of their sequences. Each call makes its own plan. A model with many layers
    instead makes AttentionMetadata once per step and calls paged_attention in each layer.

    Args:
        q, cache, scale, window, softcap, sinks, impl: see paged_attention_with_lse.
        block_tables: [S, max_blocks] int32 on the host; sequences share their equal leading ids. Those of
            blocks that no query of a sequence sees may be any.
        seq_lens: [S] int32 on the host, tokens in the cache, including the query tokens.
        cu_seqlens_q: [S + 1] int32 on the host, cumulative query lengths.

    Returns:
        [T, H, D] in the dtype of q.

    Raises:
        InvalidArgumentError: a shape, dtype, device, length or block id does not fit.
        ConfigError: impl is unknown or cannot run here.
    """
    check_forward_only(q)
    seq_lens, cu_seqlens_q, query_lens = check_lengths(seq_lens, cu_seqlens_q)
    metadata = AttentionMetadata(
        cu_seqlens_q=_to_device(cu_seqlens_q, q.device),
        seq_lens=_to_device(seq_lens, q.device),
        positions=_to_device(concatenated_ranges(seq_lens - query_lens, query_lens), q.device),
        slot_mapping=torch.full((q.shape[0],), -1, device=q.device),
        block_table=_to_device(block_tables, q.device),
        max_query_len=int(query_lens.max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)),
    )
    arrays = (block_tables, seq_lens, cu_seqlens_q)
    if choose_impl(impl, q.device.type, cache.k.dtype, q.dtype) == "triton":
        work = _device_forest(q, cache, arrays, window)
    else:
        work = ForestPlan.from_block_tables(*arrays, cache.k.shape[1], window=window)
    metadata, masks = replace(metadata, work=work), {"window": window, "sinks": sinks}
    return paged_attention(q, cache, metadata, scale=scale, softcap=softcap, impl=impl, **masks)


def _device_forest(
    q: Tensor, cache: LayerCache, arrays: tuple[np.ndarray, np.ndarray, np.ndarray], window: int | None
) -> DeviceForest | None:
    forest = DeviceForest(
        max_num_seqs=arrays[1].shape[0],
        max_num_tokens=q.shape[0],
        num_heads=q.shape[1],
        num_kv_heads=cache.k.shape[2],
        head_dim=q.shape[2],
        block_size=cache.k.shape[1],
        dtype=cache.k.dtype,
        device=q.device,
        window=window,
    )
    plan = forest.plan(*arrays)
    if plan.num_units == 0:
        return None
    forest.upload(plan)
    return forest


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(device)
