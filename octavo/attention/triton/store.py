"""Write new keys and values to their slots of the paged cache."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.cache import LayerCache
from octavo.kernels.device import power_of_two
from octavo.kernels.launch import launch


class Rows(NamedTuple):
    """Pointer and strides (in elements) of [T, KH, D] sources."""

    pointer: Any
    token: Any
    head: Any


class Blocks(NamedTuple):
    """Pointer and strides (in elements) of a [N, B, KH, D] cache."""

    pointer: Any
    block: Any
    token: Any
    head: Any


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its slot, in place; see octavo.attention.store_kv.

    Slots are not checked: that would wait for the device.
    """
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    value_dim = v.shape[2]
    padded_dim = power_of_two(max(head_dim, value_dim))
    heads_per_program = min(power_of_two(num_heads), max(1, 2048 // padded_dim))
    launch(
        _store_kernel,
        (num_tokens, -(-num_heads // heads_per_program)),
        Rows(k, *k.stride()[:2]), Rows(v, *v.stride()[:2]), Blocks(cache.k, *cache.k.stride()[:3]),
        Blocks(cache.v, *cache.v.stride()[:3]), slot_mapping, cache.k_scale, cache.v_scale,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, VALUE_DIM=value_dim, BLOCK_SIZE=cache.k.shape[1],
        HEADS=heads_per_program, PADDED_DIM=padded_dim,
    )  # fmt: skip


@triton.jit
def _store_kernel(
    k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        d = tl.arange(0, PADDED_DIM)
        mask = (head < NUM_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
        value_mask = (head < NUM_HEADS)[:, None] & (d < VALUE_DIM)[None, :]
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        key = tl.load(_row(k.pointer, token * k.token, head, k.head, d), mask)
        value = tl.load(_row(v.pointer, token * v.token, head, v.head, d), value_mask)
        key = scale_down(key, k_scale, head[:, None], (head < NUM_HEADS)[:, None])
        value = scale_down(value, v_scale, head[:, None], (head < NUM_HEADS)[:, None])
        k_at, v_at = (
            _row(k_cache.pointer, block * k_cache.block + offset * k_cache.token, head, k_cache.head, d),
            _row(v_cache.pointer, block * v_cache.block + offset * v_cache.token, head, v_cache.head, d),
        )
        tl.store(k_at, round_to(key, k_at.dtype.element_ty), mask)
        tl.store(v_at, round_to(value, v_at.dtype.element_ty), value_mask)


@triton.jit
def scale_down(x, scale, head, is_head):
    """Divide x [HEADS, ...] float by the scale of each head [HEADS, 1] where is_head; scale None: by 1."""
    if scale is None:
        return x
    else:
        return x.to(tl.float32) / tl.load(scale + head, mask=is_head, other=1.0)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Round to the cache's dtype. What float8 cannot hold becomes its largest number; NaN stays NaN."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def _row(pointer, offset, head, head_stride, d):
    return pointer + offset + (head.to(tl.int64) * head_stride)[:, None] + d[None, :]
