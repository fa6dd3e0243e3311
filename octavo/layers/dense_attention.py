"""Attention of a prompt that is alone in its step, with nothing in the cache before it: by cuDNN."""

from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from octavo.layers.layer_options import LayerOptions

# Measured on an H200: with fewer tokens the paged kernel is as fast.
MIN_TOKENS = 4096


def can_attend_dense(qkv: Tensor, options: LayerOptions) -> bool:
    """Say whether cuDNN takes a layer's heads; the paged kernels take all.

    Args:
        qkv: [T, (H + 2 KH) * D] of the step.
        options: the layer.
    """
    is_plain = options.softcap == 0 and (options.window is None or options.window >= qkv.shape[0])
    return is_plain and qkv.dtype in (torch.bfloat16, torch.float16) and _has_cudnn(qkv.device)


@cache
def _has_cudnn(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device)[0] >= 9
        and torch.backends.cuda.cudnn_sdp_enabled()
        and torch.backends.cudnn.is_available()
    )


def attend_dense(qkv: Tensor, *, num_heads: int, num_kv_heads: int, scale: float) -> Tensor:
    """Attend causally.

    Args:
        qkv: [T, (H + 2 KH) * D] normed and rotated: q heads, k heads, v heads.
        num_heads: H.
        num_kv_heads: KH.
        scale: factor of q.k.

    Returns:
        A new [T, H * D].
    """
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1)).transpose(0, 1)
    q, k, v = (part.unsqueeze(0) for part in heads.split((num_heads, num_kv_heads, num_kv_heads)))
    backend = SDPBackend.CUDNN_ATTENTION if qkv.is_cuda else SDPBackend.MATH
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)
