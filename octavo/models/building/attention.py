"""Makes the attention of decoder layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.gemm.linear import Linear
from octavo.layers import (
    AttentionLayer,
    BlockInput,
    BlockOutput,
    HeadRMSNorm,
    LayerOptions,
    WideQKNorm,
)
from octavo.models.building.packing import Packing
from octavo.models.parameters import projections
from octavo.parallel import shard_heads


@dataclass(frozen=True, slots=True)
class _Heads:
    """A rank's heads of one layer: their ranges and dimension, and the projections that the layer has."""

    query: range
    kv: range
    head_dim: int
    own: tuple[str, ...]

    def rows(self, heads: range) -> slice:
        """Return the rows of some heads in their projection."""
        return slice(heads.start * self.head_dim, heads.stop * self.head_dim)


class Attention(Packing):
    """Makes a rank's attention layers."""

    def _attention(self, prefix: str, index: int, stream_scale: float) -> AttentionLayer:
        config, block = self._config, f"{prefix}.self_attn"
        heads = self._heads(index)
        norm = None
        if config.has_pre_norms:
            norm = self._norm(f"{prefix}.input_layernorm", stream_scale=stream_scale)
        post_norm = self._norm(f"{prefix}.post_attention_layernorm") if config.has_post_norms else None
        qkv = self._qkv(block, heads)
        output = self._row_parallel(f"{block}.o_proj", heads.rows(heads.query), config.has_output_bias)
        return AttentionLayer(
            qkv_proj=BlockInput(norm, qkv),
            o_proj=BlockOutput(output, post_norm, self._parallel),
            wide_norm=self._wide_qk_norm(block, heads) if config.has_wide_qk_norm else None,
            options=LayerOptions(
                layer=config.layer_caches[index],
                rope=config.layer_ropes[index],
                scale=config.attention_scale,
                window=config.layer_windows[index],
                softcap=config.attention_softcap,
                qk_norm=self._qk_norm(block, heads) if config.has_qk_norm else None,
                sinks=self._sinks(block, heads.query) if config.has_sinks else None,
                has_gemvs=qkv.has_gemv and output.has_gemv,
                value_norm=config.rms_norm_eps if config.has_value_norm else None,
                keys_are_values=config.keys_are_values(index),
                shares_cache=config.shares_cache(index),
            ),
        )

    def _heads(self, index: int) -> _Heads:
        config = self._config
        cache, own = config.cache_layer(index), projections(config, index)
        heads = shard_heads(config.num_heads, cache.num_kv_heads, self._parallel)
        return _Heads(heads.query, heads.kv, cache.head_dim, own)

    def _qkv(self, prefix: str, heads: _Heads) -> Linear:
        rows = [heads.rows(heads.query if name == "q" else heads.kv) for name in heads.own]
        names = [f"{prefix}.{name}_proj" for name in heads.own]
        return self._fused(names, rows, self._config.has_qkv_bias, heads.head_dim)

    def _sinks(self, prefix: str, heads: range) -> Tensor:
        return self._checkpoint.read(f"{prefix}.sinks", rows=self._part(slice(heads.start, heads.stop)))

    def _qk_norm(self, prefix: str, heads: _Heads) -> HeadRMSNorm:
        weights = []
        for name, own in zip(heads.own[:2], (heads.query, heads.kv), strict=False):
            weight = self._norm_weight(f"{prefix}.{name}_norm", torch.float32)
            weights.append(self._interleaved(weight, heads.head_dim).expand(len(own), -1))
        return HeadRMSNorm(torch.cat(weights), self._config.rms_norm_eps)

    def _wide_qk_norm(self, prefix: str, heads: _Heads) -> WideQKNorm:
        q, k = (
            self._interleaved(self._norm_weight(f"{prefix}.{name}"), heads.head_dim)[heads.rows(part)]
            for name, part in (("q_norm", heads.query), ("k_norm", heads.kv))
        )
        config = self._config
        sizes = (config.num_heads * heads.head_dim, config.num_kv_heads * heads.head_dim)
        return WideQKNorm((q, k), sizes, config.rms_norm_eps, self._parallel)
