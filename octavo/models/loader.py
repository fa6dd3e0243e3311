"""Builds a decoder from a checkpoint, layer by layer.

    names and shapes   parameter_shapes(config) says what the checkpoint must hold; what is missing,
                       unexpected or of another shape is refused before any weight is read
    each weight        the builder reads it (this rank's part), reorders it, joins it with its neighbours and
                       packs it for its GEMM

A tensor that only a new family has needs its shape in `parameters` and its layer in `builder`. Beside weights
of any dtype, tools that calibrate a float8 KV cache write its scales, the values that 1.0 in the cache stands
for; vLLM uses the same names:

    model.layers.0.self_attn.k_scale   [1], or [KH] or [KH, 1, 1]: one for each kv head
    model.layers.0.self_attn.v_scale
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from octavo.errors import ConfigError, WeightsError
from octavo.gemm.cpu.huge_pages import return_freed_memory
from octavo.layers import Rotary, inverse_frequencies
from octavo.layers.stack import make_stack
from octavo.models.builder import Builder
from octavo.models.checkpoint import Checkpoint, check_tensors
from octavo.models.decoder import Decoder
from octavo.models.experts.names import with_expert_names
from octavo.models.model_config import ModelConfig
from octavo.models.one_thread import one_thread
from octavo.models.parameters import draft_names, parameter_shapes, unread_names, with_own_projections
from octavo.models.storage import kept_storage
from octavo.models.weights import QuantisedSource, WeightSource
from octavo.parallel import TensorParallel, shard_heads


def kv_scale_names(config: ModelConfig) -> list[str]:
    """Return the names of all scales, layer after layer: that of keys, then that of values."""
    layers = range(len(config.cache_layers))
    return [f"model.layers.{layer}.self_attn.{name}" for layer in layers for name in ("k_scale", "v_scale")]


def read_kv_scales(weights: WeightSource, config: ModelConfig, parallel: TensorParallel) -> Tensor | None:
    """Read the scales of a rank's kv heads.

    Args:
        weights: the checkpoint.
        config: the network.
        parallel: this rank.

    Returns:
        [cache layers, 2, most kv heads of a layer on this rank] float32 on the CPU, 1 for heads that a layer
        does not have; or None where the checkpoint has none. Some tools write 0 for a cache that they never
        saw: call check_kv_scales before they are used.

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
    own = [shard_heads(config.num_heads, layer.num_kv_heads, parallel).kv for layer in config.cache_layers]
    scales = torch.ones(len(own), 2, max(map(len, own)))
    for index, name in enumerate(names):
        heads, layer = own[index // 2], config.cache_layers[index // 2]
        row = _read_scale(weights, name, layer.num_kv_heads)[heads.start : heads.stop]
        scales[index // 2, index % 2, : len(heads)] = row
    return scales


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


def _read_scale(weights: WeightSource, name: str, num_kv_heads: int) -> Tensor:
    shape = tuple(weights.shape(name))
    if shape[:1] not in ((1,), (num_kv_heads,)) or any(size != 1 for size in shape[1:]):
        raise WeightsError(f"{name} is {list(shape)}, expected [1] or [{num_kv_heads}], one per kv head")
    return weights.read(name, dtype=torch.float32).flatten().expand(num_kv_heads)


_MIXED = ("mixed", "mixed fp8")


def load_decoder(
    config: ModelConfig,
    weights: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    parallel: TensorParallel,
    max_model_len: int | None = None,
    attention_impl: str = "auto",
    quantization: str = "none",
    deterministic: bool = False,
    expert_parallel: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Load this rank's share of a model; peak memory is that of the weights plus one fused tensor.

    Args:
        config: the network.
        weights: its checkpoint; read, not closed.
        dtype: of weights and activations.
        device: where they live.
        parallel: this rank.
        max_model_len: longest text of the run, tokens; None: the model's own context. Only the rotary
            frequencies of "dynamic" and "longrope" models depend on it.
        attention_impl: see octavo.attention.available_impls.
        quantization: "auto": matrices stay quantised where the checkpoint has them so and the device
            multiplies them; "none": they do not; "fp8": all projections are rounded to float8; "bf16":
            all matrices are, to bfloat16; "mixed" and "mixed fp8": as "auto" and "fp8" those that are or
            become quantised, as "bf16" the others; "int8": all linear layers are rounded, the LM head
            included (all but "auto", "none" and "fp8": CPU, float32).
        deterministic: no bit of a token's results depends on the rest of the batch (GPU with Triton, no
            quantization).
        expert_parallel: this rank gets whole experts, instead of a part of every one.
        progress: called with (tensors read, tensors in all).

    Raises:
        WeightsError: tensors are missing, unexpected or of the wrong shape.
        ConfigError: the ranks do not divide the model, or quantization, deterministic or expert_parallel
            cannot run here.
    """
    if deterministic:
        _check_deterministic(config, quantization, parallel)
    if quantization in ("bf16", *_MIXED) and dtype != torch.float32:
        raise ConfigError(f'quantization="{quantization}" runs with activations in float32, got {dtype}')
    device = torch.device(device)
    is_gpt_oss = config.experts is not None and config.experts.is_gpt_oss
    weights = with_own_projections(with_expert_names(weights, is_gpt_oss=is_gpt_oss), config)
    shapes = parameter_shapes(config)
    check_tensors(weights, shapes, optional=_optional_names(weights, config))
    stored = weights.storage() if isinstance(weights, QuantisedSource) else {}
    own = config.with_whole_experts(parallel) if expert_parallel else config
    num_tensors = len(parameter_shapes(own))
    kept = kept_storage(shapes, stored, quantization, device=device, dtype=dtype, deterministic=deterministic)
    checkpoint = Checkpoint(weights, stored, kept, dtype, device, num_tensors=num_tensors, progress=progress)
    # It is settled which matrices stay quantised, so the builder needs only the form of the others.
    others = "bf16" if quantization in _MIXED else quantization
    builder = Builder(own, checkpoint, parallel, others, deterministic)
    with one_thread if kept and device.type == "cpu" else nullcontext():
        embedding, embedding_weight = builder.embedding()
        layer_inputs = builder.layer_inputs()
        layers = tuple(builder.layers())
        stack = make_stack([(layer.attention, layer.feed_forward) for layer in layers])
        lm_head = builder.lm_head(embedding_weight)
        pooler = builder.pooler()
    decoder = Decoder(
        config=config,
        num_heads=config.num_heads // parallel.size,
        cache_layers=config.own_cache_layers(parallel),
        attention_impl=attention_impl,
        deterministic=deterministic,
        embed_tokens=embedding,
        layer_inputs=layer_inputs,
        ropes=_ropes(config, max_model_len or config.max_position_embeddings, device),
        layers=layers,
        lm_head=lm_head,
        pooler=pooler,
        kv_scales=read_kv_scales(weights, config, parallel),
        stack=stack,
        parallel=parallel,
    )
    if device.type == "cpu":
        return_freed_memory()
    return decoder


def _optional_names(weights: WeightSource, config: ModelConfig) -> list[str]:
    return [*kv_scale_names(config), *draft_names(weights, config), *unread_names(weights, config)]


def _check_deterministic(config: ModelConfig, quantization: str, parallel: TensorParallel) -> None:
    if quantization in ("bf16", *_MIXED, "fp8", "int8"):
        raise ConfigError(
            f'deterministic=True runs with quantization="none", got {quantization!r}; use deterministic=False'
        )
    if parallel.size > 1 and config.has_wide_qk_norm:
        raise ConfigError(
            f"deterministic=True runs {config.architecture} on one rank, got {parallel.size}: its norm of "
            "queries spans the heads of all ranks; use deterministic=False"
        )


def _ropes(config: ModelConfig, max_model_len: int, device: torch.device) -> tuple[Rotary, ...]:
    ropes = []
    for rope, head_dim in zip(config.ropes, config.rope_head_dims, strict=True):
        frequencies, factor = inverse_frequencies(rope, config.rotary_dim or head_dim, max_model_len)
        growth = (rope.query_growth, rope.original_max_positions) if rope.query_growth else None
        ropes.append(Rotary(frequencies.to(device), factor, head_dim, growth))
    return tuple(ropes)
