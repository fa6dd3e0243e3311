"""Head norms, rotation and the store of keys and values in one kernel; imported only where Triton runs.

At small batches a decode step is a chain of short kernels, so a single one does everything between the fused
projection and the cache:

    qkv [T, H + 2 KH, D]   q heads   norm -> rotate -> back to qkv
                           k heads   norm -> rotate -> k_cache[slot]
                           v heads   norm, if any   -> v_cache[slot]

Where keys are values, k heads come twice: as keys, and without norm and rotation in place of v heads. Where a
layer reads another one's cache, there are only q heads.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.triton.store import round_to, scale_down
from octavo.errors import InvalidArgumentError
from octavo.kernels.device import power_of_two
from octavo.kernels.launch import launch, overlap_options, start_next, wait_for_previous

# Values per program (sixteen heads of 128) and per warp.
_VALUES, _OF_WARP = 2048, 512


def rotate_and_store(
    qkv: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_heads: int,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    query_angles: int = 0,
    keep_k: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    value_norm: float | None = None,
    keys_are_values: bool = False,
    shares_cache: bool = False,
) -> Tensor:
    """Normalise and rotate query and key heads, and write keys and values to the paged cache.

    Computes in float32. Different tokens must not share a slot.

    Args:
        qkv: [T, (H + 2 KH) * D] bfloat16, float16 or float32: q heads, k heads, v heads; last dimension
            contiguous; pairs that rotate are neighbours (see layers.rotary). The result overwrites its q
            part, with keep_k also its k part. With keys_are_values it has no v heads, with shares_cache only
            q heads.
        slot_mapping: [T] int32 or int64, block id * B + offset; -1 writes nothing.
        cos, sin: [T, at least D / 2] float32; only the first D / 2 columns are read.
        k_cache, v_cache: [N, B, KH, D] of any float dtype, any strides, last dimension contiguous; written.
            float8 (e4m3) saturates.
        num_heads: H.
        norm_weight: [H + KH, D] contiguous, RMS-norm weight of each q and k head; [H, D] with shares_cache;
            None: no norm.
        eps: added to the mean square of a head.
        query_angles: elements from a token's cosines and sines to its queries' own; 0: there are none.
        keep_k: write normed and rotated keys back to qkv, too.
        k_scale, v_scale: see LayerCache.
        value_norm, keys_are_values: see LayerOptions.
        shares_cache: write nothing to the cache.

    Returns:
        The view [T, H, D] of qkv with the rotated queries.

    Raises:
        InvalidArgumentError: a shape or stride does not fit.
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    num_keys = 0 if shares_cache else num_kv_heads
    num_all = num_heads + num_keys * (1 if keys_are_values else 2)
    _check(qkv, k_cache, v_cache, cos, sin, (num_all, num_heads + num_keys), norm_weight)
    _check_scales(k_cache, k_scale, v_scale)
    num_tokens = qkv.shape[0]
    q = qkv.as_strided((num_tokens, num_heads, head_dim), (qkv.stride(0), head_dim, 1))
    if num_tokens == 0:
        return q
    num_pairs, heads_per_program, num_programs, num_warps = _tile(head_dim, num_all)
    # Arguments go by position: 38 keywords would cost the host 3 us more in every layer.
    launch(
        _rotate_and_store_kernel,
        (num_tokens, num_programs),
        qkv, k_cache, v_cache, slot_mapping, cos, sin, cos if norm_weight is None else norm_weight, k_scale,
        v_scale, eps, value_norm or 0.0, block_size, qkv.stride(0), *k_cache.stride()[:3],
        *v_cache.stride()[:3], *cos.stride(), *sin.stride(), query_angles, num_heads, num_keys, head_dim,
        num_pairs, heads_per_program, norm_weight is not None, keep_k, value_norm is not None,
        keys_are_values,
        num_warps=num_warps, **overlap_options(qkv),
    )  # fmt: skip
    return q


@cache
def _tile(head_dim: int, num_all: int) -> tuple[int, int, int, int]:
    """Return (pairs and heads of a program, programs, warps) for a token's num_all heads."""
    num_pairs = power_of_two(head_dim // 2)
    heads_per_program = min(max(1, _VALUES // (2 * num_pairs)), power_of_two(num_all))
    num_warps = max(1, heads_per_program * num_pairs * 2 // _OF_WARP)
    return num_pairs, heads_per_program, -(-num_all // heads_per_program), num_warps


def _check(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: tuple[int, int],
    norm_weight: Tensor | None,
) -> None:
    """Check shapes and strides; heads: how many qkv has, and how many of them rotate."""
    k_shape = k_cache.shape
    if len(k_shape) != 4 or k_shape != v_cache.shape or k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise InvalidArgumentError(
            "k_cache and v_cache must both be [N, B, KH, D] with a contiguous last dimension, "
            f"got {list(k_shape)} and {list(v_cache.shape)}"
        )
    head_dim = k_shape[3]
    width = heads[0] * head_dim
    if qkv.ndim != 2 or qkv.shape[1] != width or qkv.stride(1) != 1:
        raise InvalidArgumentError(
            f"qkv must be [T, heads * D] = [T, {width}] with a contiguous last dimension, "
            f"got shape {list(qkv.shape)}, strides {list(qkv.stride())}"
        )
    cos_shape = cos.shape
    num_tokens, smallest = qkv.shape[0], head_dim // 2
    if (
        head_dim % 2
        or cos_shape != sin.shape
        or len(cos_shape) != 2
        or cos_shape[0] < num_tokens
        or cos_shape[1] < smallest
    ):
        raise InvalidArgumentError(
            f"cos and sin must both be [{num_tokens}, {smallest} or more] for even D = {head_dim}, "
            f"got {list(cos_shape)} and {list(sin.shape)}"
        )
    expected = (heads[1], head_dim)
    if norm_weight is not None and (norm_weight.shape != expected or not norm_weight.is_contiguous()):
        raise InvalidArgumentError(
            f"norm_weight must be contiguous [rotated heads, D] = {list(expected)}, "
            f"got {list(norm_weight.shape)}"
        )


def _check_scales(k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    num_kv_heads = k_cache.shape[2]
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and (scale.shape != (num_kv_heads,) or not scale.is_contiguous()):
            raise InvalidArgumentError(
                f"{name} must be contiguous [KH] = [{num_kv_heads}], got {list(scale.shape)}"
            )


@triton.jit
def load_pairs(row_at, is_row, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Load the two [HEADS, PAIRS] float32 members of each pair from [HEADS, 1] row starts."""
    # One contiguous load, then a split in registers.
    dim = tl.arange(0, 2 * PAIRS)[None, :]
    both = tl.load(row_at + dim, mask=is_row & (dim < HEAD_DIM), other=0.0).to(tl.float32)
    first, second = tl.split(tl.reshape(both, [row_at.shape[0], PAIRS, 2]))
    return first, second


@triton.jit
def inverse_lengths(first, second, eps, HEAD_DIM: tl.constexpr):
    """Return what an RMS norm without a weight multiplies heads [HEADS, 1] by, as pairs [HEADS, PAIRS]."""
    return tl.rsqrt(tl.sum(first * first + second * second, axis=1)[:, None] / HEAD_DIM + eps)


@triton.jit
def norm_pairs(first, second, first_weight, second_weight, eps, HEAD_DIM: tl.constexpr):
    """RMS-norm heads, as pairs [HEADS, PAIRS] float32."""
    scale = inverse_lengths(first, second, eps, HEAD_DIM)
    return first * scale * first_weight, second * scale * second_weight


@triton.jit
def rotate_pairs(first, second, cos, sin):
    """Rotate pairs by their angles."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def join_pairs(first, second):
    """Return pairs, each [HEADS, PAIRS], as [HEADS, 2 * PAIRS], the members of a pair side by side."""
    return tl.reshape(tl.join(first, second), [first.shape[0], 2 * first.shape[1]])


@triton.jit
def _store_pairs(row_at, is_row, first, second, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Store what load_pairs loads, rounded to the dtype of the destination."""
    dim = tl.arange(0, 2 * PAIRS)[None, :]
    both = join_pairs(first, second)
    tl.store(row_at + dim, round_to(both, row_at.dtype.element_ty), mask=is_row & (dim < HEAD_DIM))


@triton.jit
def _store_heads(
    cache_ptr, slot, block_size, stride_block, stride_token, stride_head, head, is_own,
    first, second, scale_ptr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, HALVES: tl.constexpr = False,
):  # fmt: skip
    """Divide a token's own heads by their scales, if there are any, and store them in a slot of a cache.

    HALVES: first members of all pairs come before the second ones.
    """
    row_at = cache_ptr + slot // block_size * stride_block + slot % block_size * stride_token
    row_at += head * stride_head
    first = scale_down(first, scale_ptr, head, is_own)
    second = scale_down(second, scale_ptr, head, is_own)
    if HALVES:
        pair = tl.arange(0, PAIRS)[None, :]
        is_pair = is_own & (pair < HEAD_DIM // 2)
        tl.store(row_at + pair, round_to(first, cache_ptr.dtype.element_ty), mask=is_pair)
        tl.store(row_at + HEAD_DIM // 2 + pair, round_to(second, cache_ptr.dtype.element_ty), mask=is_pair)
    else:
        _store_pairs(row_at, is_own, first, second, HEAD_DIM, PAIRS)


@triton.jit(do_not_specialize=["query_angles"])
def _rotate_and_store_kernel(
    qkv_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, cos_ptr, sin_ptr,
    norm_weight_ptr, k_scale_ptr, v_scale_ptr, eps, value_eps, block_size, stride_qkv,
    stride_k_block, stride_k_token, stride_k_head, stride_v_block, stride_v_token, stride_v_head,
    stride_cos_row, stride_cos_column, stride_sin_row, stride_sin_column, query_angles,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr,
    HEADS: tl.constexpr, NORM: tl.constexpr, KEEP_K: tl.constexpr, VALUE_NORM: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (T, ceil(heads of qkv / HEADS)). A program owns its heads: in place is safe."""
    NUM_ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    FIRST_VALUE: tl.constexpr = NUM_HEADS if KEYS_ARE_VALUES else NUM_ROTATED
    start_next(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    is_rotated = head < NUM_ROTATED
    row_at = qkv_ptr + token * stride_qkv + head * HEAD_DIM
    is_head = head < FIRST_VALUE + NUM_KV_HEADS
    wait_for_previous(OVERLAP)
    first, second = load_pairs(row_at, is_head, HEAD_DIM, PAIRS)
    first_value, second_value = first, second
    if VALUE_NORM:
        scale = inverse_lengths(first, second, value_eps, HEAD_DIM)
        first_value *= scale
        second_value *= scale
    if NORM:
        weight_at = norm_weight_ptr + head * HEAD_DIM
        first_weight, second_weight = load_pairs(weight_at, is_rotated, HEAD_DIM, PAIRS)
        first, second = norm_pairs(first, second, first_weight, second_weight, eps, HEAD_DIM)

    pair = tl.arange(0, PAIRS)[None, :]
    is_pair = is_rotated & (pair < HEAD_DIM // 2)
    shift = tl.where(head < NUM_HEADS, query_angles, 0)
    cos_at, sin_at = token * stride_cos_row + shift, token * stride_sin_row + shift
    cos = tl.load(cos_ptr + cos_at + pair * stride_cos_column, mask=is_pair, other=1.0)
    sin = tl.load(sin_ptr + sin_at + pair * stride_sin_column, mask=is_pair, other=0.0)
    first, second = rotate_pairs(first, second, cos, sin)

    is_kept = head < (NUM_ROTATED if KEEP_K else NUM_HEADS)
    _store_pairs(row_at, is_kept, first, second, HEAD_DIM, PAIRS)
    if NUM_KV_HEADS > 0:
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        if slot >= 0:
            _store_heads(
                k_cache_ptr, slot, block_size, stride_k_block, stride_k_token, stride_k_head,
                head - NUM_HEADS, is_rotated & (head >= NUM_HEADS),
                first, second, k_scale_ptr, HEAD_DIM, PAIRS,
            )  # fmt: skip
            _store_heads(
                v_cache_ptr, slot, block_size, stride_v_block, stride_v_token, stride_v_head,
                head - FIRST_VALUE, is_head & (head >= FIRST_VALUE),
                first_value, second_value, v_scale_ptr, HEAD_DIM, PAIRS, KEYS_ARE_VALUES,
            )  # fmt: skip


_TOKENS = 16


def rotation_table(
    positions: Tensor,
    inverse_frequencies: Tensor,
    lengths: Tensor,
    growth: tuple[float, int] | None = None,
) -> Tensor:
    """Return lengths times cosines and sines of every position's angles, computed in float32.

    Args:
        positions: [T] int32 or int64, contiguous.
        inverse_frequencies: [D / 2] float32, radians per position, contiguous.
        lengths: [D / 2] float32, factors of rotations, contiguous; see Rotary.
        growth: of queries; see Rotary.

    Returns:
        A new [2, T, D / 2] float32: cosines, sines. If queries grow, [4, T, D / 2]: theirs stand after them.
    """
    num_tokens, num_pairs = positions.shape[0], inverse_frequencies.shape[0]
    shape = (2 if growth is None else 4, num_tokens, num_pairs)
    table = torch.empty(shape, dtype=torch.float32, device=positions.device)
    by, period = growth or (0.0, 1)
    if num_tokens:
        launch(
            _rotation_table_kernel,
            (-(-num_tokens // _TOKENS),),
            positions, inverse_frequencies, lengths, table, num_tokens, num_pairs, TOKENS=_TOKENS,
            PAIRS=power_of_two(num_pairs), GROWTH=by, PERIOD=period,
        )  # fmt: skip
    return table


@triton.jit(do_not_specialize=["num_tokens"])
def _rotation_table_kernel(
    positions_ptr, inverse_frequencies_ptr, lengths_ptr, table_ptr, num_tokens, num_pairs: tl.constexpr,
    TOKENS: tl.constexpr, PAIRS: tl.constexpr, GROWTH: tl.constexpr, PERIOD: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(T / TOKENS),)."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    pair = tl.arange(0, PAIRS)
    position = tl.load(positions_ptr + token, mask=token < num_tokens, other=0)
    frequency = tl.load(inverse_frequencies_ptr + pair, mask=pair < num_pairs, other=0.0)
    length = tl.load(lengths_ptr + pair, mask=pair < num_pairs, other=0.0)[None, :]
    angle = position.to(tl.float32)[:, None] * frequency[None, :]
    at = token.to(tl.int64)[:, None] * num_pairs + pair[None, :]
    inside = (token < num_tokens)[:, None] & (pair < num_pairs)[None, :]
    cos, sin = length * tl.cos(angle), length * tl.sin(angle)
    size = num_tokens.to(tl.int64) * num_pairs
    tl.store(table_ptr + at, cos, mask=inside)
    tl.store(table_ptr + size + at, sin, mask=inside)
    if GROWTH > 0:
        grown = 1 + GROWTH * tl.log(1 + (position // PERIOD).to(tl.float32))[:, None]
        tl.store(table_ptr + 2 * size + at, grown * cos, mask=inside)
        tl.store(table_ptr + 3 * size + at, grown * sin, mask=inside)
