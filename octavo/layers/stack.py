"""Decoders that run all their layers in one call into C: on a CPU, those whose matrices are in blocks.

The layers of others, on any device, are called one by one.
"""

from collections.abc import Sequence

import torch

from octavo.gemm.cpu.block_linear import BlockLinear
from octavo.layers.attention import AttentionLayer
from octavo.layers.block import BlockInput, BlockOutput
from octavo.layers.compiled_stack import LayerStack, StackLayer
from octavo.layers.feed_forward import FeedForward


def unsupported_reason(attention: AttentionLayer, feed_forward: FeedForward) -> str | None:
    """Return why a layer cannot be one of a stack, or None if it can."""
    if attention.wide_norm is not None:
        return "it norms queries and keys over all heads"
    options = attention.options
    if options.value_norm is not None or options.keys_are_values or options.shares_cache:
        return "it norms values, or has none of its own"
    if options.sinks is not None:
        return "its query heads have sinks"
    inputs = ((attention.qkv_proj, None), (feed_forward.gate_up_proj, "silu"))
    if not all(_is_known_input(block, activation) for block, activation in inputs):
        return "a norm, an activation or a weight is of another kind"
    if not all(_is_known_output(block) for block in (attention.o_proj, feed_forward.down_proj)):
        return "an output has a norm, several ranks or a weight of another kind"
    return None


def make_stack(layers: Sequence[tuple[AttentionLayer, object]]) -> LayerStack | None:
    """Return a decoder's layers as one call, or None if they have to be called one by one."""
    known = [
        (attention, feed_forward)
        for attention, feed_forward in layers
        if isinstance(feed_forward, FeedForward) and unsupported_reason(attention, feed_forward) is None
    ]
    if len(known) < len(layers):
        return None
    return LayerStack([_describe(*layer) for layer in known], alive=known)


def _is_known_input(block: BlockInput, activation: str | None) -> bool:
    if block.norm is None:
        return False
    weight = block.norm.weight
    is_float = weight.dtype == torch.float32 and weight.is_contiguous()
    return block.activation == activation and is_float and _address(block) is not None


def _is_known_output(block: BlockOutput) -> bool:
    return block.norm is None and block.parallel.size == 1 and _address(block) is not None


def _address(block: BlockInput | BlockOutput) -> int | None:
    """Return the address of a linear layer as C knows it, or None if C does not."""
    projection = block.projection
    linear = projection.compiled if isinstance(projection, BlockLinear) else None
    return None if linear is None else linear.address


def _describe(attention: AttentionLayer, feed_forward: FeedForward) -> StackLayer:
    qkv, o, options = attention.qkv_proj, attention.o_proj, attention.options
    gate_up, down, head_norm = feed_forward.gate_up_proj, feed_forward.down_proj, options.qk_norm
    assert qkv.norm is not None, "_is_known_input takes norms only"
    assert gate_up.norm is not None, "_is_known_input takes norms only"
    return StackLayer(
        *(_address(block) for block in (qkv, o, gate_up, down)),
        *(norm.weight.data_ptr() for norm in (qkv.norm, gate_up.norm)),
        None if head_norm is None else head_norm.weight.data_ptr(),
        options.layer,
        options.rope,
        options.window or 0,
        qkv.norm.eps,
        gate_up.norm.eps,
        0.0 if head_norm is None else head_norm.eps,
        options.scale,
        options.softcap,
    )
