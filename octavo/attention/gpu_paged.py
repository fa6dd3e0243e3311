"""Paged attention on NVIDIA GPUs: the task map of a step, and the kernels that a layer launches.

Importing this file imports no Triton.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.attention.cache import FLOAT8, LayerCache
from octavo.attention.checks import check_shared, check_work
from octavo.attention.merge import add_sinks
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.score_options import ScoreOptions
from octavo.attention.tilings.portable import ONE_BLOCK
from octavo.errors import InvalidArgumentError
from octavo.kernels.device import triton_unsupported_reason

if TYPE_CHECKING:
    from octavo.attention.plan.device_forest import DeviceForest
    from octavo.attention.triton.kernel_call import Call, StepMap

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, FLOAT8)


def unsupported_reason(device_type: str, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot run on a device type with a cache dtype, or None if they can."""
    if dtype not in _DTYPES:
        return f"it is written for bfloat16, float16, float32 and float8_e4m3fn, not {dtype}"
    reason = triton_unsupported_reason(device_type)
    if reason is not None:
        return reason
    if device_type == "cpu":
        return f"Triton's interpreter has no {dtype}" if dtype in (torch.bfloat16, FLOAT8) else None
    if dtype == FLOAT8 and torch.cuda.get_device_capability() < (8, 9):
        return "float8 caches need a GPU of compute capability 8.9 or later"
    return None


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its slot, in place; see octavo.attention.store_kv.

    Slots are not checked against the size of the cache: that would wait for the device.
    """
    from octavo.attention.triton import store

    store.store_kv(k, v, cache, slot_mapping)


def paged_attention_with_lse(
    q: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    options: ScoreOptions,
    *,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor]:
    """Make a task map and attend; see octavo.attention.paged_attention_with_lse. Does not wait for the
    device.

    A model instead calls make_step_map once per step, and attend_with_map in each layer.

    Raises:
        InvalidArgumentError: the scale is not positive.
    """
    if q.shape[0] == 0 or metadata.seq_lens.shape[0] == 0:
        out, lse = q.new_zeros(*q.shape[:2], cache.v.shape[3]), q.new_empty(q.shape[:2], dtype=torch.float32)
        return add_sinks(out, lse.fill_(-torch.inf), options.sinks, q.dtype)
    step_map = make_step_map(q, cache, metadata, options.window, right=options.right, num_splits=num_splits)
    return attend_with_map(q, cache, metadata, options, step_map)


def uniform_attention_with_lse(
    q: Tensor,
    cache: LayerCache,
    seq_lens: Tensor,
    block_table: Tensor,
    options: ScoreOptions,
    *,
    query_len: int,
    max_seq_len: int,
    kv_begin: Tensor | None = None,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor]:
    """Make a task map in one launch and attend; see octavo.attention.uniform_attention_with_lse.

    There are 1 to triton.shapes.MOST_UNIFORM sequences, and query_len is at least 1.
    """
    from octavo.attention.triton import uniform_map

    step_map, cu_seqlens_q = uniform_map.make_uniform_map(
        seq_lens, kv_begin, query_len=query_len, max_seq_len=max_seq_len, num_heads=q.shape[1],
        num_kv_heads=cache.k.shape[2], head_dim=q.shape[2], value_dim=cache.v.shape[3], dtype=q.dtype,
        cache_dtype=cache.k.dtype, block_size=ONE_BLOCK if block_table.shape[1] == 1 else cache.k.shape[1],
        options=options, num_splits=num_splits,
    )  # fmt: skip
    assert step_map.positions is not None
    metadata = AttentionMetadata(
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        positions=step_map.positions,
        # Attention does not read it.
        slot_mapping=step_map.positions,
        block_table=block_table,
        max_query_len=query_len,
        max_seq_len=max_seq_len,
        kv_begin=kv_begin,
        may_be_short=True,
    )
    return attend_with_map(q, cache, metadata, options, step_map)


def make_step_map(
    q: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    window: int | None = None,
    *,
    deterministic: bool = False,
    right: int | None = 0,
    num_splits: int = 0,
) -> "StepMap":
    """Make a step's task map, for every layer with the shapes and dtypes of q and cache; see
    step_map.make_step_map.

    There is at least one query token and one sequence.

    Raises:
        InvalidArgumentError: the work is a ForestPlan.
    """
    from octavo.attention.triton import step_map

    check_work(metadata.work, "triton")
    return step_map.make_step_map(
        metadata, num_tokens=q.shape[0], num_heads=q.shape[1], num_kv_heads=cache.k.shape[2],
        head_dim=q.shape[2], dtype=q.dtype, cache_dtype=cache.k.dtype,
        block_size=_block_size(cache, metadata), window=window, deterministic=deterministic, right=right,
        num_splits=num_splits, value_dim=cache.v.shape[3],
    )  # fmt: skip


def attend_with_map(
    q: Tensor, cache: LayerCache, metadata: AttentionMetadata, options: ScoreOptions, step_map: "StepMap"
) -> tuple[Tensor, Tensor]:
    """Attend by a step's task map; arguments and results as for paged_attention_with_lse.

    Raises:
        InvalidArgumentError: the scale is not positive, the map is for another window, or a float8 cache
            has an odd head dim or stride.
    """
    _check(cache, options, step_map)
    if options.sinks is not None:
        return _attend_with_sinks(q, cache, metadata, options, step_map)
    return _attend_with_map(q, cache, metadata, options, step_map, q.dtype)


def _attend_with_sinks(
    q: Tensor, cache: LayerCache, metadata: AttentionMetadata, options: ScoreOptions, step_map: "StepMap"
) -> tuple[Tensor, Tensor]:
    """Attend in float32 and let the sinks join, so that results are rounded once."""
    from octavo.attention.triton import kernel_call, sinks

    assert options.sinks is not None
    out, lse = _attend_with_map(q, cache, metadata, options, step_map, torch.float32)
    result, _ = kernel_call.empty_results(q, cache.v.shape[3])
    sinks.add_sinks(out, lse, options.sinks.contiguous(), result)
    return result, lse


def _attend_with_map(
    q: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    options: ScoreOptions,
    step_map: "StepMap",
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Attend without sinks; dtype: of the results."""
    from octavo.attention.triton import kernel_call, nodes

    results = kernel_call.empty_results(q, cache.v.shape[3], dtype)
    forest = step_map.forest
    positions = metadata.positions if step_map.positions is None else step_map.positions
    begins, one_block = metadata.kv_begin is not None, is_one_block(metadata)
    if forest is None:
        call = kernel_call.make_call(
            q, cache, positions, metadata.block_table, options, results, begins=begins, one_block=one_block
        )
        _attend_units(call, metadata, step_map, early=False)
        return results
    _check_forest(cache, options)
    node_call = nodes.node_call(q, cache, positions, options, forest)
    leaf_results = (forest.leaf_out[: q.shape[0]], forest.leaf_lse[: q.shape[0]])
    leaves = kernel_call.make_call(
        q, cache, positions, metadata.block_table, options, leaf_results, one_block=one_block
    )
    attend_fat_nodes(node_call, forest, decodes=metadata.max_query_len == 1)
    _attend_units(leaves, metadata, step_map, early=True)
    if forest.has_thin_units:
        # Launched after the leaves: every step has leaves, but many have no thin nodes.
        nodes.attend_thin_nodes(node_call, forest)
    nodes.merge_nodes(results, forest)
    return results


def _check(cache: LayerCache, options: ScoreOptions, step_map: "StepMap") -> None:
    if not options.scale > 0:
        raise InvalidArgumentError(f"the Triton kernels need a positive scale, got {options.scale}")
    if options.window != step_map.window or options.right != step_map.right:
        raise InvalidArgumentError(
            f"the task map is for window {step_map.window} and right {step_map.right}, this layer has "
            f"{options.window} and {options.right}; make one map for each"
        )
    if cache.k.dtype == FLOAT8 and any(
        size % 2 for x in (cache.k, cache.v) for size in (x.shape[3], *x.stride()[:3])
    ):
        raise InvalidArgumentError(
            f"the Triton kernels need float8 caches of even head dim and strides, "
            f"got {cache.k.shape[3]} and {cache.k.stride()}, {cache.v.shape[3]} and {cache.v.stride()}"
        )


def _check_forest(cache: LayerCache, options: ScoreOptions) -> None:
    """Check that a layer can read shared keys once for several sequences."""
    if cache.v.shape[3] != cache.k.shape[3]:
        raise InvalidArgumentError(
            f"a forest needs keys and values of one head dim, got {cache.k.shape[3]} and {cache.v.shape[3]}"
        )
    check_shared(cache, options)


def is_one_block(metadata: AttentionMetadata) -> bool:
    """Return whether each sequence lies within one block, as in dense and in ragged caches."""
    return metadata.block_table.shape[1] == 1


def _block_size(cache: LayerCache, metadata: AttentionMetadata) -> int:
    """Return the block size for which kernels are chosen and compiled."""
    return ONE_BLOCK if is_one_block(metadata) else cache.k.shape[1]


def _attend_units(call: "Call", metadata: AttentionMetadata, step_map: "StepMap", *, early: bool) -> None:
    """Attend the units of the map; early: see triton.paged_decode.attend_decode."""
    from octavo.attention.hopper import tma_decode, tma_prefill
    from octavo.attention.triton import paged_decode, paged_prefill

    if not step_map.covers_all:
        call.queries.out.zero_()
        call.queries.lse.fill_(-torch.inf)
    work = step_map.decode
    if work is not None:
        kernel = tma_decode if tma_decode.unsupported_reason(call, work) is None else paged_decode
        kernel.attend_decode(call, metadata, work, early=early)
    work = step_map.prefill
    if work is not None:
        kernel = tma_prefill if tma_prefill.unsupported_reason(call, work) is None else paged_prefill
        kernel.attend_prefill(call, work)


def attend_fat_nodes(call: "Call", forest: "DeviceForest", *, decodes: bool) -> None:
    """Attend the shared nodes with many query tokens; see triton.nodes.attend_fat_nodes."""
    from octavo.attention.hopper import tma_prefill
    from octavo.attention.triton import nodes

    kernel = tma_prefill if tma_prefill.nodes_unsupported_reason(call, forest) is None else nodes
    kernel.attend_fat_nodes(call, forest, decodes=decodes)
