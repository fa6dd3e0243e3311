"""The public operators of a paged KV cache: store keys and values, and attend. They check their arguments."""

from torch import Tensor

from octavo.attention.cache import LayerCache
from octavo.attention.checks import check_attention, check_num_splits, check_store
from octavo.attention.implementations import choose_for_call, implementation
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.score_options import ScoreOptions


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
    chosen = implementation(choose_for_call(impl, cache, k.dtype))
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
    return implementation(chosen).paged_attention_with_lse(q, cache, metadata, options, **on_gpu)
