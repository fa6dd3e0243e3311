"""A paged cache as TMA reads it: one matrix whose tiles are copied to shared memory.

cache [N, B, KH, D]      a matrix of rows of D numbers, token after token in memory
part  (block, head, t)   rows of it, from block * block_rows + head * head_rows + t on, of 128 bytes each
"""

import functools
import math
from typing import NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.attention.hopper.pipe import Places
from octavo.attention.tilings import hopper as shapes
from octavo.attention.triton.kernel_call import Call

_Sizes = tuple[int, ...]
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_SWIZZLED_BYTES = 128


def unsupported_reason(call: Call) -> str | None:
    """Return why Hopper's kernels cannot run on a call's cache and options, or None if they can."""
    options, k, v = call.options, call.layer.k, call.layer.v
    if options.softcap != 0 or options.alibi_slopes is not None:
        return "it has no softcap and no ALiBi"
    if k.dtype != call.q.dtype:
        return "its products read what TMA wrote: queries and cache must have one dtype"
    strides = k.stride()
    if strides != v.stride() or (k.data_ptr() | v.data_ptr()) % 16 != 0:
        return "keys and values must have the same strides and begin at multiples of 16 bytes"
    if k.shape[3] != v.shape[3]:
        return f"keys and values must have one head dim, not {k.shape[3]} and {v.shape[3]}"
    return _layout_unsupported_reason(call.q.device, k.dtype, k.shape[3], call.block_size, strides)


@functools.cache
def _layout_unsupported_reason(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int, strides: _Sizes
) -> str | None:
    reason = shapes.unsupported_reason(device, dtype, head_dim=head_dim, block_size=block_size)
    if reason is not None:
        return reason
    block, token, head, _ = strides
    if block % token == 0 and (head % token == 0 or head < token) and token % 8 == 0:
        return None
    return f"a cache with strides {strides} is no matrix of tokens for TMA"


class _Address(NamedTuple):
    """The part of a tensor that a descriptor needs; keeping it does not keep the memory alive."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


def describe_caches(call: Call, keys: int) -> tuple[TensorDescriptor, TensorDescriptor, Places]:
    """Describe a call's keys and values to TMA, for tiles of `keys` keys in parts that lie in one block each.

    Where a sequence lies within one block, tiles begin at any multiple of `keys`. The last one may reach into
    other memory of the cache, or past its end, where TMA reads 0.
    """
    k, v = call.layer.k, call.layer.v
    geometry = (k.dtype, k.shape, k.stride(), math.gcd(keys, call.block_size))
    k_matrix, places = _describe(k.data_ptr(), *geometry)
    v_matrix, _ = _describe(v.data_ptr(), *geometry)
    return k_matrix, v_matrix, places


# Room for the layers of a few models at a time.
@functools.lru_cache(maxsize=1024)
def _describe(
    pointer: int, dtype: torch.dtype, shape: _Sizes, strides: _Sizes, keys: int
) -> tuple[TensorDescriptor, Places]:
    """Describe the cache [N, B, KH, D] at an address as a matrix, copied in parts of `keys` keys."""
    num_blocks, block_size, num_heads, head_dim = shape
    block, token, head, _ = strides
    head_rows, head_columns = (head // token, 0) if head % token == 0 else (0, head)
    block_rows = block // token
    num_rows = (num_blocks - 1) * block_rows + (num_heads - 1) * head_rows + block_size
    size = [num_rows, (num_heads - 1) * head_columns + head_dim]
    part = [keys, _SWIZZLED_BYTES // dtype.itemsize]
    layout = gl.NVMMASharedLayout.get_default_for(part, _DTYPES[dtype])
    matrix = TensorDescriptor(_Address(pointer, dtype), size, [token, 1], part, layout)
    return matrix, Places(block_rows, head_rows, head_columns)
