"""Attention of a fresh prompt by torch against the definition."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton_layer_cases import assert_as_good_as_torch, random

from octavo.layers.layer_options import LayerOptions
from octavo.layers.steps.cudnn_prompt import attend_dense, unsupported_reason


def options(*, window: int | None = None, softcap: float = 0.0) -> LayerOptions:
    return LayerOptions(layer=0, rope=0, scale=0.1, window=window, softcap=softcap, qk_norm=None)


def plain(qkv: Tensor, num_heads: int, num_kv_heads: int, scale: float, dtype: torch.dtype) -> Tensor:
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1)).to(dtype)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
    k, v = (part.repeat_interleave(num_heads // num_kv_heads, dim=1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    future = torch.ones(len(qkv), len(qkv), dtype=torch.bool, device=qkv.device).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 64), (3, 3, 8)])
def test_it_is_causal_attention_of_grouped_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    qkv = random(37, (num_heads + 2 * num_kv_heads) * head_dim, device="cpu", dtype=torch.float32)
    out = attend_dense(qkv, num_heads=num_heads, num_kv_heads=num_kv_heads, scale=0.3)
    torch.testing.assert_close(out, plain(qkv, num_heads, num_kv_heads, 0.3, torch.float32))


def test_only_plain_layers_on_a_gpu_take_it() -> None:
    qkv = torch.zeros(8, 32, dtype=torch.bfloat16)
    assert unsupported_reason(qkv, options(), num_heads=2, num_kv_heads=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (9, 3, 64)])
def test_it_is_as_good_as_torch_in_bfloat16(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    shape = (1000, (num_heads + 2 * num_kv_heads) * head_dim)
    qkv = random(*shape, device="cuda", dtype=torch.bfloat16)
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs a Hopper GPU or later")
    assert not unsupported_reason(qkv, options(), **heads)
    assert not unsupported_reason(qkv, options(window=1000), **heads)
    assert unsupported_reason(qkv, options(window=999), **heads)
    assert unsupported_reason(qkv, options(softcap=30.0), **heads)
    with_sinks = replace(options(), sinks=torch.zeros(num_heads, device="cuda"))
    assert unsupported_reason(qkv, with_sinks, **heads) == "it has no sinks"
    scale = head_dim**-0.5
    out = attend_dense(qkv, **heads, scale=scale)
    exact, same = (plain(qkv, num_heads, num_kv_heads, scale, dtype) for dtype in (torch.float64, qkv.dtype))
    assert_as_good_as_torch(out, same, exact)
