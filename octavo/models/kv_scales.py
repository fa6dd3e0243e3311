"""Reads a checkpoint's scales of a float8 KV cache: the value that 1.0 in the cache stands for.

    model.layers.0.self_attn.k_scale   [1], or [KH] or [KH, 1, 1]: one for each kv head
    model.layers.0.self_attn.v_scale

Tools that calibrate a cache write them beside weights of any dtype. vLLM uses the same names.
"""

import torch
from torch import Tensor

from octavo.errors import WeightsError
from octavo.models.model_config import ModelConfig
from octavo.models.weights import WeightSource


def kv_scale_names(config: ModelConfig) -> list[str]:
    """Return the names of all scales, layer after layer: that of keys, then that of values."""
    layers = range(config.num_layers)
    return [f"model.layers.{layer}.self_attn.{name}" for layer in layers for name in ("k_scale", "v_scale")]


def read_kv_scales(weights: WeightSource, config: ModelConfig, heads: range) -> Tensor | None:
    """Read the scales of some kv heads.

    Args:
        weights: the checkpoint.
        config: the network.
        heads: kv heads of this rank.

    Returns:
        [L, 2, len(heads)] float32 on the CPU, or None where the checkpoint has none. Some tools write 0 for a
        cache that they never saw: call check_kv_scales before they are used.

    Raises:
        WeightsError: only some are there, or a scale is neither [1] nor [KH].
    """
    names, present = kv_scale_names(config), weights.names()
    missing = [name for name in names if name not in present]
    if len(missing) == len(names):
        return None
    if missing:
        raise WeightsError(
            f"the checkpoint lacks {missing[0]}, but has scales of other layers; expected all or none of them"
        )
    rows = torch.stack([_read(weights, name, config.num_kv_heads) for name in names])
    return rows.view(config.num_layers, 2, config.num_kv_heads)[..., heads.start : heads.stop]


def check_kv_scales(scales: Tensor, config: ModelConfig) -> None:
    """Check that a float8 cache can divide by scales, [L, 2, heads].

    Raises:
        WeightsError: one is not a finite number above 0.
    """
    for name, scale in zip(kv_scale_names(config), scales.flatten(0, 1), strict=True):
        if not bool(((scale > 0) & scale.isfinite()).all()):
            raise WeightsError(
                f"{name} must hold finite numbers above 0 for a float8 cache, got {scale.tolist()}; use "
                'kv_cache_dtype="auto"'
            )


def _read(weights: WeightSource, name: str, num_kv_heads: int) -> Tensor:
    shape = tuple(weights.shape(name))
    if shape[:1] not in ((1,), (num_kv_heads,)) or any(size != 1 for size in shape[1:]):
        raise WeightsError(f"{name} is {list(shape)}, expected [1] or [{num_kv_heads}], one per kv head")
    return weights.read(name, dtype=torch.float32).flatten().expand(num_kv_heads)
