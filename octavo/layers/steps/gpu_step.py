"""A step's attention on an NVIDIA GPU: per layer, one kernel fills the cache and a few read it."""

from typing import Any

from torch import Tensor

from octavo.attention import AttentionMetadata, KVCache
from octavo.attention.cache import FLOAT8, LayerCache
from octavo.attention.gpu_paged import attend_with_map, make_step_map
from octavo.attention.score_options import ScoreOptions
from octavo.attention.step.fused_decode import FusedWork, attend_fused
from octavo.attention.step.fused_decode import unsupported_reason as fused_unsupported_reason
from octavo.attention.step.rotate_store import rotate_and_store, rotation_table
from octavo.attention.triton.kernel_call import StepMap
from octavo.layers.layer_options import LayerOptions
from octavo.layers.rotary import Rotary
from octavo.layers.steps import cudnn_prompt


class TritonStep:
    """AttentionStep by Triton kernels. It never waits for the device, so a CUDA graph can capture it.

    The first layer with a window makes the task map for it, and other layers reuse the map. Layers with the
    window of the forest in their metadata read shared prefixes once, by it; others read per sequence. A
    long fresh prompt that is the whole step goes to cuDNN if it supports the layer. Between GEMVs, which
    fetch weights early, one kernel does all for the tokens of up to 16 sequences that share nothing; between
    other GEMMs it was slower.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        *,
        num_heads: int,
        deterministic: bool = False,
    ) -> None:
        """Keep a step of a group of layers; `num_heads` is H, `deterministic` as for make_step_map."""
        self._deterministic = deterministic
        # A float8 cache rounds keys and values, and later steps read the rounded ones: this step must, too.
        is_exact = kv_cache.data.dtype != FLOAT8 and not deterministic
        self._is_dense = (
            metadata.is_fresh and is_exact and metadata.positions.shape[0] >= cudnn_prompt.MIN_TOKENS
        )
        self._kv_cache = kv_cache
        self._metadata = metadata
        self._num_heads = num_heads
        # By window and cache shape.
        self._maps: dict[tuple[int | None, ...], StepMap] = {}
        num_sequences, num_tokens = metadata.seq_lens.shape[0], metadata.positions.shape[0]
        shares = metadata.forest is not None or metadata.kv_begin is not None
        is_old = num_tokens == 1 or metadata.keys_are_old
        self._is_fused = 0 < num_tokens == num_sequences and is_old and not shares and not deterministic
        self._fused_works: dict[tuple[int, ...], FusedWork] = {}

    def rotations(self, rope: Rotary, positions: Tensor) -> Tensor:
        """See AttentionStep: the table of cosines and sines that rotation_table returns."""
        return rotation_table(positions, rope.inverse_frequencies, rope.lengths, rope.growth)

    def attend(self, qkv: Tensor, rotations: Tensor, options: LayerOptions) -> Tensor:
        """See AttentionStep."""
        cache = self._kv_cache.layer(options.layer)
        qk_norm, window = options.qk_norm, options.window
        scores = ScoreOptions(options.scale, window, options.softcap, sinks=options.sinks)
        norm: dict[str, Any] = {} if qk_norm is None else {"norm_weight": qk_norm.weight, "eps": qk_norm.eps}
        cos, sin, *grown = rotations
        norm["query_angles"] = 2 * rotations.stride(0) if grown else 0
        values = {"value_norm": options.value_norm, "keys_are_values": options.keys_are_values}
        if self._fuses(qkv, cache, options):
            # Layers of one shape share this memory, as they share the map.
            work = self._fused_works.get(cache.k.shape) or FusedWork.allocate(cache, self._num_heads)
            self._fused_works[cache.k.shape] = work
            out = attend_fused(qkv, cache, self._metadata, cos, sin, scores, work, **norm, **values)
            return out.flatten(1)
        heads = {"num_heads": self._num_heads, "num_kv_heads": cache.k.shape[2]}
        is_dense = self._is_dense and cudnn_prompt.unsupported_reason(qkv, options, **heads) is None
        q = rotate_and_store(
            qkv, self._metadata.slot_mapping, cos, sin, cache.k, cache.v, num_heads=self._num_heads,
            keep_k=is_dense, k_scale=cache.k_scale, v_scale=cache.v_scale,
            shares_cache=options.shares_cache, **norm, **values,
        )  # fmt: skip
        if is_dense:
            return cudnn_prompt.attend_dense(qkv, **heads, scale=options.scale)
        kind = (window, *cache.k.shape)
        if kind not in self._maps:
            self._maps[kind] = make_step_map(
                q, cache, self._metadata, window, deterministic=self._deterministic
            )
        out, _ = attend_with_map(q, cache, self._metadata, scores, self._maps[kind])
        return out.flatten(1)

    def _fuses(self, qkv: Tensor, cache: LayerCache, options: LayerOptions) -> bool:
        """Return whether one kernel does all of a layer's attention."""
        if not self._is_fused or not options.has_gemvs or options.shares_cache:
            return False
        return fused_unsupported_reason(cache, qkv.shape[0], self._num_heads) is None
