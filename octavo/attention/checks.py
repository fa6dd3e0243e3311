"""Checks of arguments: shapes, dtypes, devices. Each check raises InvalidArgumentError.

None of them waits for a GPU, except check_slots.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from octavo.attention.cache import FLOAT8, LayerCache
from octavo.attention.lengths import check_capacity
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.plan.device_forest import DeviceForest
from octavo.attention.plan.host_plan import ForestPlan
from octavo.attention.score_options import ScoreOptions
from octavo.errors import InvalidArgumentError

_FLOAT8_INPUTS = (torch.float32, torch.bfloat16, torch.float16)


def check_forward_only(*tensors: Tensor | None) -> None:
    """Refuse to drop a derivative that the caller would expect: of reverse mode, forward mode or torch.func.

    A transform of torch.func is refused whatever it wraps: what a call makes inside of it is wrapped, too.
    """
    inputs = [x for x in tensors if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise InvalidArgumentError(
            "these operators compute no gradients; call them under torch.no_grad() or torch.inference_mode()"
        )
    # torch.compile evaluates the next two conditions while it traces, so they hold in graphs, too.
    if torch._C._functorch.maybe_current_level() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        raise InvalidArgumentError(
            "these operators compute no gradients and know no transforms of torch.func (grad, jvp, vmap...); "
            "call them outside"
        )
    if forward_ad._current_level < 0 or not torch._C._is_fwd_grad_enabled():
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise InvalidArgumentError(
            "these operators compute no gradients, and the tangents of forward mode neither; call them under "
            "torch.inference_mode(), or with the primals"
        )


def check_store(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Check the arguments of store_kv."""
    _check_cache(cache)
    check_forward_only(k, v, cache.k, cache.v, cache.k_scale, cache.v_scale)
    check_writable("k_cache", cache.k)
    check_writable("v_cache", cache.v)
    for name, tensor, stored in (("k", k, cache.k), ("v", v, cache.v)):
        expected = (slot_mapping.shape[0] if slot_mapping.dim() == 1 else "T", *stored.shape[2:])
        if tuple(tensor.shape) != expected:
            raise InvalidArgumentError(
                f"{name} must be [T, KH, D] = {list(expected)} to fit slot_mapping and cache; "
                f"got {list(tensor.shape)}"
            )
        _check_like(name, tensor, cache.k)
    if cache.k_scale is not None and cache.k_scale.dim() == 2:
        raise InvalidArgumentError(
            "k_scale and v_scale must be [KH] to store, because a token's sequence is not known here; "
            f"got {list(cache.k_scale.shape)}"
        )
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        raise InvalidArgumentError(f"slot_mapping must be int32 or int64; got {slot_mapping.dtype}")
    _check_device("slot_mapping", slot_mapping, cache.k)


def check_writable(name: str, tensor: Tensor) -> None:
    """Check that each number of a tensor, in which results are written, has memory of its own."""
    strides = tensor.stride()
    if 0 in strides and any(
        stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=True)
    ):
        raise InvalidArgumentError(f"{name} is expanded: its tokens share memory, so none can be written")


def check_attention(q: Tensor, cache: LayerCache, metadata: AttentionMetadata, options: ScoreOptions) -> None:
    """Check the arguments of paged_attention."""
    _check_tensors(q, cache, metadata.block_table.shape[0], options)
    _check_metadata(q, cache.k.shape[1], metadata)
    if metadata.plan is not None and metadata.plan.sharing.num_nodes > 0:
        check_shared(cache, options)


def check_uniform(
    q: Tensor,
    cache: LayerCache,
    seq_lens: Tensor,
    block_table: Tensor,
    options: ScoreOptions,
    query_len: int,
    max_seq_len: int,
    kv_begin: Tensor | None,
) -> None:
    """Check the arguments of uniform_attention_with_lse."""
    num_sequences = seq_lens.shape[0] if seq_lens.dim() == 1 else 0
    _check_tensors(q, cache, num_sequences, options)
    if query_len < 0 or q.shape[0] != num_sequences * query_len:
        raise InvalidArgumentError(
            f"q must have {query_len} rows for each entry of seq_lens {list(seq_lens.shape)}; "
            f"got {list(q.shape)}"
        )
    int32, int64 = torch.int32, torch.int64
    for name, tensor, dtypes in (("seq_lens", seq_lens, (int32, int64)), ("kv_begin", kv_begin, (int32,))):
        if tensor is None:
            continue
        if tensor.shape != (num_sequences,) or tensor.dtype not in dtypes or not tensor.is_contiguous():
            raise InvalidArgumentError(
                f"{name} must be contiguous [{num_sequences}] int32; got {list(tensor.shape)} {tensor.dtype}"
            )
        _check_device(name, tensor, q)
    if block_table.dim() != 2 or block_table.shape[0] != num_sequences or block_table.dtype != torch.int32:
        raise InvalidArgumentError(
            f"block_table must be [{num_sequences}, max_blocks] int32, one row per seq_lens entry; "
            f"got {list(block_table.shape)} {block_table.dtype}"
        )
    _check_device("block_table", block_table, q)
    check_capacity(max_seq_len, cache.k.shape[1], block_table)


def _check_tensors(q: Tensor, cache: LayerCache, num_sequences: int, options: ScoreOptions) -> None:
    _check_cache(cache)
    check_forward_only(q, cache.k, cache.v, cache.k_scale, cache.v_scale, options.sinks, options.alibi_slopes)
    num_kv_heads, head_dim = cache.k.shape[2:]
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] % num_kv_heads or q.shape[1] == 0:
        raise InvalidArgumentError(
            f"q must be [T, H, {head_dim}] with H a multiple of the cache's {num_kv_heads} kv heads; "
            f"got {list(q.shape)}"
        )
    _check_like("q", q, cache.k)
    sinks, slopes = options.sinks, options.alibi_slopes
    if sinks is not None:
        if sinks.shape != (q.shape[1],) or not sinks.is_floating_point():
            raise InvalidArgumentError(
                f"sinks must be [{q.shape[1]}], a floating number per query head; "
                f"got {list(sinks.shape)} {sinks.dtype}"
            )
        _check_device("sinks", sinks, q)
    if slopes is not None:
        per_head = q.shape[1:2]
        if slopes.shape not in (per_head, (num_sequences, *per_head)) or slopes.dtype != torch.float32:
            raise InvalidArgumentError(
                f"alibi_slopes must be [{q.shape[1]}] float32, one per query head, or "
                f"[{num_sequences}, {q.shape[1]}] with those of each sequence; "
                f"got {list(slopes.shape)} {slopes.dtype}"
            )
        _check_device("alibi_slopes", slopes, q)
    for name, scale in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale)):
        if scale is not None and scale.dim() == 2 and scale.shape[0] != num_sequences:
            raise InvalidArgumentError(
                f"{name} must have a row for each of the {num_sequences} sequences; got {list(scale.shape)}"
            )


def _check_metadata(q: Tensor, block_size: int, metadata: AttentionMetadata) -> None:
    positions = metadata.positions
    if positions.shape != q.shape[:1]:
        raise InvalidArgumentError(
            f"positions must be [{q.shape[0]}] int32, one per row of q; got {list(positions.shape)}"
        )
    _check_device("positions", positions, q)
    _check_device("block_table", metadata.block_table, q)
    check_capacity(metadata.max_seq_len, block_size, metadata.block_table)
    if metadata.plan is not None:
        check_plan(metadata.plan, q.shape[0], block_size, metadata)


def check_work(work: ForestPlan | DeviceForest | None, impl: str) -> None:
    """Raise InvalidArgumentError if an implementation does not read a step's kind of work."""
    if impl == "triton" and isinstance(work, ForestPlan):
        raise InvalidArgumentError(
            "work is a ForestPlan, which the Triton kernels do not read; give a DeviceForest, or None"
        )
    if impl != "triton" and isinstance(work, DeviceForest):
        raise InvalidArgumentError(
            "work is a DeviceForest, which only the Triton kernels read; give a ForestPlan, or None"
        )


def check_plan(plan: ForestPlan, num_query_tokens: int, block_size: int, metadata: AttentionMetadata) -> None:
    """Check that a plan belongs to this step."""
    num_sequences = metadata.block_table.shape[0]
    if plan.num_tokens > num_query_tokens or plan.num_sequences != num_sequences:
        raise InvalidArgumentError(
            f"the plan is of another step: it covers {plan.num_tokens} tokens of {plan.num_sequences} "
            f"sequences, but q has {num_query_tokens} tokens and block_table {num_sequences} rows"
        )
    check_capacity(plan.max_kv_len, block_size, metadata.block_table)


def check_shared(cache: LayerCache, options: ScoreOptions) -> None:
    """Check that keys mean the same to all sequences that share them."""
    slopes, scale = options.alibi_slopes, cache.k_scale
    if (slopes is not None and slopes.dim() == 2) or (scale is not None and scale.dim() == 2):
        raise InvalidArgumentError(
            "sequences that share keys need the same alibi_slopes [H], k_scale and v_scale [KH]; "
            "leave the plan or forest out"
        )


def check_mask(plan: ForestPlan, right: int | None, window: int | None) -> None:
    """Check that a plan lists all keys that a token sees."""
    if plan.window is not None and (window is None or window > plan.window):
        raise InvalidArgumentError(
            f"the plan is for window={plan.window}, this call has window={window}; make one for that"
        )
    if plan.right is not None and (right is None or right > plan.right):
        raise InvalidArgumentError(
            f"the plan is for right={plan.right}, this call has right={right}; make one with right={right}"
        )


def check_num_splits(num_splits: int) -> None:
    """Check the number of parts into which keys are split."""
    if not isinstance(num_splits, int) or isinstance(num_splits, bool) or num_splits < 0:
        raise InvalidArgumentError(
            f"num_splits must be 0 (automatic) or the number of parts, an int; got {num_splits!r}"
        )


def check_slots(slot_mapping: Tensor, num_slots: int) -> None:
    """Check that every slot exists or is -1; on a GPU this waits for the device."""
    bad = torch.nonzero((slot_mapping < -1) | (slot_mapping >= num_slots))
    if bad.shape[0]:
        raise bad_slot(int(bad[0]), int(slot_mapping[bad[0]]), num_slots)


def bad_slot(token: int, slot: int, num_slots: int) -> InvalidArgumentError:
    """Return the error for a token whose slot does not exist."""
    return InvalidArgumentError(
        f"slot_mapping[{token}] is {slot}; slots go from 0 to {num_slots - 1}, and -1 writes nothing"
    )


def bad_block(row: int, column: int, block_id: int, num_blocks: int) -> InvalidArgumentError:
    """Return the error for a block table entry that names no block."""
    return InvalidArgumentError(
        f"block_table[{row}, {column}] names a block outside 0..{num_blocks - 1} within the sequence's "
        f"length: {block_id}; fill in the ids of all its blocks"
    )


def check_blocks(block_table: Tensor, rows: Tensor, columns: Tensor, num_blocks: int) -> None:
    """Check that the entries (rows[i], columns[i]) name blocks that exist; skipped on a GPU."""
    if block_table.device.type != "cpu":
        return
    ids = block_table[rows, columns]
    bad = torch.nonzero((ids < 0) | (ids >= num_blocks))
    if bad.shape[0]:
        first = int(bad[0])
        raise bad_block(int(rows[first]), int(columns[first]), int(ids[first]), num_blocks)


def _check_cache(cache: LayerCache) -> None:
    if not isinstance(cache, LayerCache):
        raise InvalidArgumentError(
            f"the cache must be a LayerCache, such as KVCache.layer(index) gives; got {type(cache).__name__}"
        )
    k_cache, v_cache = cache.k, cache.v
    if k_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3] or k_cache.dtype != v_cache.dtype:
        raise InvalidArgumentError(
            f"k_cache and v_cache must be [N, B, KH, D] of one shape and dtype, except for D; "
            f"got {list(k_cache.shape)} {k_cache.dtype} and {list(v_cache.shape)} {v_cache.dtype}"
        )
    if v_cache.dim() != 4 or 0 in (*k_cache.shape[1:], *v_cache.shape[3:]):
        raise InvalidArgumentError(
            f"a cache's blocks must have at least one token, kv head and dimension each; got [N, B, KH, D] = "
            f"{list(k_cache.shape)} and {list(v_cache.shape)}"
        )
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise InvalidArgumentError("the last dimension of k_cache and v_cache must be contiguous (stride 1)")
    if cache.k_scale is not None or cache.v_scale is not None:
        _check_scales(cache)


def _check_scales(cache: LayerCache) -> None:
    if cache.k.dtype != FLOAT8:
        raise InvalidArgumentError(f"k_scale and v_scale are for float8 caches, this one is {cache.k.dtype}")
    num_kv_heads = cache.k.shape[2]
    for name, scale in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale)):
        if scale is None:
            raise InvalidArgumentError(f"{name} is missing; give both scales or neither")
        is_shaped = scale.dim() in (1, 2) and scale.shape[-1] == num_kv_heads
        if not is_shaped or scale.dtype != torch.float32 or not scale.is_contiguous():
            raise InvalidArgumentError(
                f"{name} must be contiguous [{num_kv_heads}] float32, one per kv head, or "
                f"[S, {num_kv_heads}]; got {list(scale.shape)} {scale.dtype}"
            )
        _check_device(name, scale, cache.k)
    if cache.k_scale is not None and cache.v_scale is not None and cache.k_scale.shape != cache.v_scale.shape:
        raise InvalidArgumentError(
            f"k_scale and v_scale must have one shape; got {list(cache.k_scale.shape)} and "
            f"{list(cache.v_scale.shape)}"
        )


def _check_like(name: str, tensor: Tensor, cache: Tensor) -> None:
    if cache.dtype == FLOAT8:
        if tensor.dtype not in _FLOAT8_INPUTS:
            raise InvalidArgumentError(
                f"{name} must be float32, bfloat16 or float16 for a float8 cache, got {tensor.dtype}"
            )
    elif tensor.dtype != cache.dtype and not _is_narrower(cache, tensor):
        raise InvalidArgumentError(
            f"{name} must have the cache's dtype {cache.dtype}, got {tensor.dtype}; convert it first"
        )
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise InvalidArgumentError(f"the last dimension of {name} must be contiguous (stride 1)")
    _check_device(name, tensor, cache)


def _is_narrower(cache: Tensor, tensor: Tensor) -> bool:
    """Return whether a CPU's kernels take such a tensor with a cache of fewer bits."""
    return cache.device.type == "cpu" and (cache.dtype, tensor.dtype) == (torch.bfloat16, torch.float32)


def _check_device(name: str, tensor: Tensor, other: Tensor) -> None:
    if tensor.device != other.device:
        raise InvalidArgumentError(f"{name} is on {tensor.device}, the cache on {other.device}; move one")
