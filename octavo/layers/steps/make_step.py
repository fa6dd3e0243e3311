"""The one place that chooses a step's attention: prepared for C, GPU kernels, or the public operators."""

from collections.abc import Sequence

import torch

from octavo.attention import AttentionMetadata, KVCache
from octavo.attention.implementations import choose_impl
from octavo.errors import ConfigError, InvalidArgumentError
from octavo.layers.steps import cpu_step
from octavo.layers.steps.grouped_step import GroupedStep
from octavo.layers.steps.operator_step import AttentionStep, OperatorStep


def make_step(
    kv_cache: KVCache,
    groups: Sequence[AttentionMetadata],
    *,
    num_heads: int,
    impl: str,
    dtype: torch.dtype,
    deterministic: bool = False,
) -> AttentionStep:
    """Return the fastest AttentionStep that `impl` allows.

    Args:
        kv_cache: all layers.
        groups: the step, as each of the cache's groups of layers sees it.
        num_heads: H.
        impl: attention implementation.
        dtype: of queries.
        deterministic: a token's result must not depend on what else is in the step; "triton" alone can.

    Raises:
        ConfigError: deterministic, and `impl` is not "triton" here.
        InvalidArgumentError: the cache has another number of groups.
    """
    layers = kv_cache.groups
    if len(groups) != len(layers):
        raise InvalidArgumentError(
            f"the KV cache has {len(layers)} groups of layers, each with block tables of its own; got the "
            f"metadata of {len(groups)}"
        )
    steps = {
        index: _make_step(kv_cache, index, metadata, num_heads, impl, dtype, deterministic)
        for index, metadata in enumerate(groups)
        if layers[index]
    }
    if len(steps) == 1:
        return next(iter(steps.values()))
    return GroupedStep({layer: step for index, step in steps.items() for layer in layers[index]})


def _make_step(
    kv_cache: KVCache,
    group: int,
    metadata: AttentionMetadata,
    num_heads: int,
    impl: str,
    dtype: torch.dtype,
    deterministic: bool,
) -> AttentionStep:
    if not deterministic and cpu_step.unsupported_reason(kv_cache, impl, dtype) is None:
        return cpu_step.CpuStep(kv_cache, metadata, num_heads=num_heads, group=group)
    if choose_impl(impl, kv_cache.data.device.type, kv_cache.data.dtype, dtype) == "triton":
        from octavo.layers.steps.gpu_step import TritonStep

        return TritonStep(kv_cache, metadata, num_heads=num_heads, deterministic=deterministic)
    if deterministic:
        raise ConfigError(
            f'deterministic=True needs attention_impl="triton" on an NVIDIA GPU, got {impl!r} on '
            f"{kv_cache.data.device}; use deterministic=False"
        )
    return OperatorStep(kv_cache, metadata, num_heads, impl)
