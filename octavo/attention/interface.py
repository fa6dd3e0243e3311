"""Store to and attend over a paged KV cache: the checked entry points."""

from torch import Tensor

from octavo.attention.cache import LayerCache
from octavo.attention.checks import check_attention, check_store
from octavo.attention.choice import choose_impl, implementation
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.options import ScoreOptions


def store_kv(
    k: Tensor,
    v: Tensor,
    cache: LayerCache,
    slot_mapping: Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Write each token's key and value to its slot of the cache, in place.

    Args:
        k: [T, KH, D] keys; a strided view of a fused qkv will do, its last dimension contiguous. In the
            dtype of the cache; float32, bfloat16 or float16 for a float8 (float8_e4m3fn) one.
        v: [T, KH, D] values, likewise.
        cache: one layer's, such as KVCache.layer gives; written. A float8 one with scales stores k / k_scale,
            and saturates.
        slot_mapping: [T] int32 or int64, block id * B + offset; -1 writes nothing.
        impl: "auto" or one of available_impls().

    Raises:
        InvalidArgumentError: a shape, dtype, device or slot does not fit.
        ConfigError: impl is unknown or cannot run here.
    """
    check_store(k, v, cache, slot_mapping)
    chosen = implementation(choose_impl(impl, cache.k.device.type, cache.k.dtype))
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
    impl: str = "auto",
) -> Tensor:
    """Attend each query token to its own sequence's keys in the cache; returns [T, H, D], dtype of q.

    As paged_attention_with_lse, without the second result.
    """
    return paged_attention_with_lse(
        q,
        cache,
        metadata,
        scale=scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
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
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend each query token to its own sequence's keys in the cache.

    The token at position p sees the keys j <= p, j < seq_len and, with a window, j > p - window. Query
    head h reads kv head h // (H / KH). Any mix of prefill and decode, any block size and head dim.

    Args:
        q: [T, H, D] queries, any strides, last dimension contiguous. In the dtype of the cache; float32,
            bfloat16 or float16 for a float8 (float8_e4m3fn) one.
        cache: one layer's, such as KVCache.layer gives.
        metadata: the step; without work in it each call makes its own, in which nothing is shared.
        scale: factor of q.k, usually 1 / sqrt(D).
        window: a token sees its last `window` keys, itself included; None: all.
        softcap: scores become softcap * tanh(score / softcap); 0: off.
        alibi_slopes: [H] float32; adds -slope * (p - j) to the scores.
        impl: "auto" or one of available_impls().

    Returns:
        (out [T, H, D] in the dtype of q, lse [T, H] float32: natural log of the sum of exponentials).
        Where a token sees nothing, out is 0 and lse is -inf.

    Raises:
        InvalidArgumentError: a shape, dtype, device, option or length does not fit, or on a CPU the block
            table names a block that does not exist within the length of a sequence with query tokens.
        ConfigError: impl is unknown or cannot run here.
    """
    options = ScoreOptions(scale, window, softcap, alibi_slopes)
    check_attention(q, cache, metadata, options)
    chosen = implementation(choose_impl(impl, q.device.type, cache.k.dtype))
    return chosen.paged_attention_with_lse(q, cache, metadata, options)
