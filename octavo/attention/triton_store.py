# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
"""Write new keys and values to their slots of the paged cache."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


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


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its slot, in place; see octavo.attention.store_kv.

    A negative slot writes nothing. That slots exist is not checked: it would wait for the device.
    """
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    padded_dim = triton.next_power_of_2(head_dim)
    heads_abreast = min(triton.next_power_of_2(num_heads), max(1, 2048 // padded_dim))
    _store_kernel[(num_tokens, triton.cdiv(num_heads, heads_abreast))](
        Rows(k, *k.stride()[:2]),
        Rows(v, *v.stride()[:2]),
        Blocks(k_cache, *k_cache.stride()[:3]),
        Blocks(v_cache, *v_cache.stride()[:3]),
        slot_mapping,
        *(num_heads, head_dim, k_cache.shape[1], heads_abreast, padded_dim),
    )


@triton.jit
def _store_kernel(
    k, v, k_cache, v_cache, slot_mapping,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        d = tl.arange(0, PADDED_DIM)
        mask = (head < NUM_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        key = tl.load(_row(k.pointer, token * k.token, head, k.head, d), mask)
        value = tl.load(_row(v.pointer, token * v.token, head, v.head, d), mask)
        k_at, v_at = (
            block * k_cache.block + offset * k_cache.token,
            block * v_cache.block + offset * v_cache.token,
        )
        tl.store(_row(k_cache.pointer, k_at, head, k_cache.head, d), key, mask)
        tl.store(_row(v_cache.pointer, v_at, head, v_cache.head, d), value, mask)


@triton.jit
def _row(pointer, offset, head, head_stride, d):
    return pointer + offset + (head.to(tl.int64) * head_stride)[:, None] + d[None, :]
