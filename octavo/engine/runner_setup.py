"""Plans a model, loads its weights, allocates the KV cache and chooses the runner."""

import logging
from collections.abc import Callable

from octavo.attention import KVCache
from octavo.attention.implementations import choose_impl
from octavo.config import EngineConfig
from octavo.engine.memory import ExecutionPlan, gib, plan_execution
from octavo.engine.memory.working import rank_share
from octavo.engine.model_runner import ModelRunner
from octavo.engine.step.result import StepRunner
from octavo.engine.structured.token_masks import TokenMasks
from octavo.errors import ConfigError
from octavo.models import (
    Decoder,
    ModelSource,
    check_kv_scales,
    load_decoder,
    open_weights,
    parameter_shapes,
    read_model,
    resolve_model,
    stored_matrices,
)
from octavo.parallel import TensorParallel

logger = logging.getLogger(__name__)


def plan_model(config: EngineConfig, parallel: TensorParallel) -> tuple[ModelSource, ExecutionPlan]:
    """Find the model that a config names, and plan one rank; see plan_execution.

    Raises:
        ModelError: it cannot be found, read or supported.
        ConfigError: an option contradicts the model or the machine.
        OutOfMemoryError: what the options ask for does not fit.
    """
    source = resolve_model(config.model, config.load_format)
    model = read_model(source, config.task)
    stored = stored_matrices(source, config.load_format)
    return source, plan_execution(config, model, parallel, stored=stored)


def read_decoder(
    source: ModelSource, plan: ExecutionPlan, progress: Callable[[int, int], None] | None
) -> Decoder:
    """Load a model's weights.

    Args:
        source: where they are.
        plan: the network, and how it runs.
        progress: called with (tensors loaded, tensors in all), or None.

    Raises:
        ModelError: the weights do not fit the network, or cannot be read.
    """
    config = plan.config
    weights = open_weights(source, config.load_format, shapes=parameter_shapes(plan.model), seed=config.seed)
    try:
        return load_decoder(
            plan.model,
            weights,
            dtype=plan.dtype,
            device=plan.device,
            parallel=plan.parallel,
            max_model_len=plan.max_model_len,
            attention_impl=config.attention_impl,
            quantization=plan.quantization,
            deterministic=config.deterministic,
            expert_parallel=config.expert_parallel,
            progress=progress,
        )
    finally:
        weights.close()


def make_runner(decoder: Decoder, plan: ExecutionPlan, masks: TokenMasks | None = None) -> StepRunner:
    """Allocate the KV cache, and return what runs the decoder over it on the plan's device.

    Args:
        decoder: the network, or this rank's part.
        plan: how to run it.
        masks: forbids what grammars do not take; None: the runner's own.

    Raises:
        ConfigError: the decoder was loaded for other steps (deterministic or not), or for another rank.
        OutOfMemoryError: the cache does not fit.
    """
    _check_decoder(decoder, plan)
    cache = _allocate_kv_cache(decoder, plan)
    # This call also compiles the attention kernels of a CPU on first use, so that no request waits for them.
    impl = choose_impl(decoder.attention_impl, plan.device.type, cache.data.dtype, plan.dtype)
    if plan.device.type == "cuda" and impl == "triton":
        from octavo.engine.gpu.kernel_cache import KernelCache
        from octavo.engine.gpu.runner import GpuRunner

        kernels = KernelCache(plan.config.kernel_cache_dir)
        logger.info("compiled kernels are kept in %s, %s", kernels.folder, gib(kernels.num_bytes))
        return GpuRunner(decoder, cache, plan, kernels, masks)
    return ModelRunner(decoder, cache, plan, masks)


def log_plan(plan: ExecutionPlan, source: ModelSource) -> None:
    """Log how much memory a rank will take."""
    logger.info(
        "%s on %s, rank %d of %d: weights %s, KV cache %s (%d tokens), activations %s of %s free",
        source.path,
        plan.device,
        plan.parallel.rank,
        plan.parallel.size,
        gib(plan.weight_bytes),
        gib(plan.kv_bytes),
        plan.num_kv_tokens,
        gib(plan.working_bytes),
        gib(plan.free_bytes),
    )
    for rope in plan.model.ropes:
        if rope.rope_type == "longrope" and plan.max_model_len > rope.original_max_positions:
            logger.info(
                "all texts have LongRoPE's long factors, as max_model_len is %d; texts of up to %d tokens "
                "are best with max_model_len=%d",
                plan.max_model_len,
                rope.original_max_positions,
                rope.original_max_positions,
            )


def _check_decoder(decoder: Decoder, plan: ExecutionPlan) -> None:
    deterministic = plan.config.deterministic
    if decoder.deterministic != deterministic:
        raise ConfigError(
            f"deterministic={deterministic} contradicts the decoder that was given, "
            f"which was loaded with deterministic={decoder.deterministic}"
        )
    share = rank_share(decoder.config, plan.parallel, expert_parallel=plan.config.expert_parallel)
    if decoder.cache_layers != share.cache_layers:
        raise ConfigError(
            f"a decoder with {share.num_kv_heads} kv heads is needed by each of {plan.parallel.size} ranks, "
            f"the one that was given has {decoder.num_kv_heads}; load it for the engine's rank"
        )


def _allocate_kv_cache(decoder: Decoder, plan: ExecutionPlan) -> KVCache:
    cache = KVCache.of_layout(plan.layout, plan.num_blocks, plan.kv_dtype, plan.device)
    if cache.scales is not None and decoder.kv_scales is not None:
        check_kv_scales(decoder.kv_scales, decoder.config)
        for index, (k_scale, v_scale) in enumerate(decoder.kv_scales):
            layer = cache.layer(index)
            for own, found in ((layer.k_scale, k_scale), (layer.v_scale, v_scale)):
                assert own is not None, "a float8 cache has scales"
                own.copy_(found[: len(own)])
    return cache
