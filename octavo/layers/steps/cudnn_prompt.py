"""cuDNN attention for a step of a single prompt, with nothing in the cache before it."""

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from octavo.kernels.device import nvidia_generation
from octavo.layers.layer_options import LayerOptions

# Measured on an H200: with fewer tokens the paged kernel is as fast.
MIN_TOKENS = 4096


def unsupported_reason(
    qkv: Tensor, options: LayerOptions, *, num_heads: int, num_kv_heads: int
) -> str | None:
    """Return why cuDNN cannot attend a layer's heads, or None if it can; arguments as for attend_dense."""
    if nvidia_generation(qkv.device) < 9 or qkv.dtype not in (torch.bfloat16, torch.float16):
        return "it is for bfloat16 and float16 on Hopper GPUs or later"
    if options.softcap != 0 or (options.window is not None and options.window < qkv.shape[0]):
        return "it has no softcap, and no window shorter than the prompt"
    if options.sinks is not None:
        return "it has no sinks"
    if options.value_norm is not None or options.keys_are_values or options.shares_cache:
        return "it reads keys and values of the fused projection, as they come"
    # torch itself checks this before it calls cuDNN: head dims, versions, whether cuDNN is disabled.
    q, k, v = _heads(qkv, num_heads, num_kv_heads)
    is_supported = can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, True))
    return None if is_supported else "cuDNN refuses these heads, or is switched off"


def attend_dense(qkv: Tensor, *, num_heads: int, num_kv_heads: int, scale: float) -> Tensor:
    """Attend a prompt causally, by cuDNN.

    Args:
        qkv: [T, (H + 2 KH) * D] normed and rotated: q heads, k heads, v heads.
        num_heads: H.
        num_kv_heads: KH.
        scale: factor of q.k.

    Returns:
        A new [T, H * D].
    """
    q, k, v = _heads(qkv, num_heads, num_kv_heads)
    backend = SDPBackend.CUDNN_ATTENTION if qkv.is_cuda else SDPBackend.MATH
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


def _heads(qkv: Tensor, num_heads: int, num_kv_heads: int) -> list[Tensor]:
    """Views [1, heads, T, D] of q, k and v."""
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1)).transpose(0, 1)
    return [part.unsqueeze(0) for part in heads.split((num_heads, num_kv_heads, num_kv_heads))]
