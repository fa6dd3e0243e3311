"""Attention of one call, by the kernels of octavo.attention, or by the reference for what they lack."""

import functools

import torch
from torch import Tensor
from torch.nn import functional

from octavo.attention import (
    AttentionMetadata,
    ForestPlan,
    LayerCache,
    gpu_paged,
    paged_attention_with_lse,
    uniform_attention_with_lse,
)
from octavo.attention.cache import FLOAT8
from octavo.attention.checks import check_mask, check_shared, check_work
from octavo.attention.implementations import choose_for_call
from octavo.attention.merge import add_sinks
from octavo.attention.score_options import ScoreOptions
from octavo.attention.tilings.portable import MOST_UNIFORM
from octavo.ops import on_cpu
from octavo.ops.call import Call, Keys, Queries, RaggedQueries, Scores, contiguous, is_on_gpu, rows_of
from octavo.ops.checks import debug


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Return (out [T, H, Dv] in the dtype of q, lse [T, H] float32); see octavo.ops.specification.

    Raises:
        InvalidArgumentError: (on a CPU, or on a GPU with OCTAVO_DEBUG=1) a length or block id is
            out of range.
    """
    call = _contiguous(call)
    q, keys = call.queries.q, call.keys
    is_cpu = not is_on_gpu(q)
    if _is_empty(call):
        if is_cpu or debug.is_on():
            debug.check_call(call)
        return _nothing(call)
    if is_cpu and call.queries.used is not None:
        return _attend_used(call)
    if not is_cpu and debug.is_on():
        debug.check_call(call)
    scores = call.scores
    queries, scale = _positive(call.queries, scores.scale)
    value_dim, keys = keys.v.shape[3], keys if is_cpu else _even(keys)
    if keys.k.shape[3] != queries.q.shape[2]:
        queries = queries.replaced(functional.pad(queries.q, (0, 1)))
    if queries is not call.queries or keys is not call.keys:
        call = call._replace(queries=queries, keys=keys)
    options = _options(scale, scores)
    if is_cpu:
        out, lse = _attend_on_cpu(call, options)
    elif queries.cu_seqlens is None and queries.used is None and call.plan is None:
        out, lse = _attend_uniform(call, options)
    else:
        out, lse = _attend_ragged(call, options)
    return out if out.shape[2] == value_dim else out[..., :value_dim], lse


def check_plan_fits(call: Call) -> None:
    """Check that a plan is for this call, whose last keys need not be in the cache yet.

    Raises:
        InvalidArgumentError: kernels do not read its kind; or, on a CPU, it was made for other lengths or
            another mask, or keys cannot be shared.
    """
    plan, keys = call.plan, call.keys
    layer, options = LayerCache(keys.k, keys.v, keys.k_scale, keys.v_scale), _options(1.0, call.scores)
    check_work(plan, choose_for_call("auto", layer, call.queries.q.dtype, options))
    if not isinstance(plan, ForestPlan) or is_on_gpu(call.queries.q) or _is_empty(call):
        return
    debug.check_queries(call.queries, keys.seq_lens.shape[0])
    if call.queries.used is not None:
        call = call._replace(queries=_used_queries(call)[1])
        if _is_empty(call):
            return
    call = call._replace(keys=keys._replace(seq_lens=keys.seq_lens.clamp(min=0)))
    _metadata(call, _ragged(call.queries, call.keys.seq_lens))
    check_mask(plan, options.right, options.window)
    if plan.sharing.num_nodes > 0:
        check_shared(layer, options)


def _is_empty(call: Call) -> bool:
    """Return whether there is no query, or no key for any."""
    keys = call.keys
    return keys.capacity == 0 or 0 in (keys.k.shape[0], keys.seq_lens.shape[0], call.queries.q.shape[0])


def _options(scale: float, scores: Scores) -> ScoreOptions:
    window = None if scores.left is None else scores.left + 1
    if scores.alibi_slopes is None and scores.sinks is None:
        return _plain_options(scale, window, scores.softcap, scores.right)
    return ScoreOptions(scale, window, scores.softcap, scores.alibi_slopes, scores.right, scores.sinks)


@functools.lru_cache(maxsize=64)
def _plain_options(scale: float, window: int | None, softcap: float, right: int | None) -> ScoreOptions:
    return ScoreOptions(scale, window, softcap, None, right)


def _contiguous(call: Call) -> Call:
    """Return the call with contiguous last dimensions, which kernels read; copies where they are not.

    Also of tensors that are negative by a bit of their own: kernels read the numbers in memory.
    """
    q, keys = call.queries.q, call.keys
    if q.is_neg() or keys.k.is_neg() or keys.v.is_neg():
        call = call._replace(
            queries=call.queries.replaced(q.resolve_neg()),
            keys=keys._replace(k=keys.k.resolve_neg(), v=keys.v.resolve_neg()),
        )
        q, keys = call.queries.q, call.keys
    if q.stride(-1) == keys.k.stride(-1) == keys.v.stride(-1) == 1:
        return call
    keys = keys._replace(k=contiguous(keys.k), v=contiguous(keys.v))
    return call._replace(queries=call.queries.replaced(contiguous(q)), keys=keys)


def _attend_uniform(call: Call, options: ScoreOptions) -> tuple[Tensor, Tensor]:
    """Attend queries of one length on a GPU: their positions and work are made in one launch."""
    keys = call.keys
    layer = LayerCache(keys.k, keys.v, keys.k_scale, keys.v_scale)
    is_checked = choose_for_call("auto", layer, call.queries.q.dtype, options) == "triton"
    # octavo.ops has checked the call, so the function below the checks is called.
    is_checked = is_checked and call.queries.length > 0 and 1 <= keys.seq_lens.shape[0] <= MOST_UNIFORM
    attend_uniform = gpu_paged.uniform_attention_with_lse if is_checked else uniform_attention_with_lse
    return attend_uniform(
        call.queries.q,
        layer,
        keys.seq_lens,
        keys.block_table,
        options,
        query_len=call.queries.length,
        max_seq_len=keys.capacity,
        kv_begin=keys.begin,
        num_splits=call.num_splits,
    )


def _attend_on_cpu(call: Call, options: ScoreOptions) -> tuple[Tensor, Tensor]:
    keys = call.keys
    layer = LayerCache(keys.k, keys.v, keys.k_scale, keys.v_scale)
    if call.plan is None and choose_for_call("auto", layer, call.queries.q.dtype, options) == "c":
        return on_cpu.attend(call, layer, options)
    plan = on_cpu.host_work(call, options).plan
    call = call._replace(
        keys=keys._replace(seq_lens=keys.seq_lens.clamp(min=0)),
        plan=call.plan if isinstance(call.plan, ForestPlan) else plan,
    )
    return _attend_ragged(call, options)


def _attend_ragged(call: Call, options: ScoreOptions) -> tuple[Tensor, Tensor]:
    keys, queries = call.keys, _ragged(call.queries, call.keys.seq_lens)
    metadata = _metadata(call, queries)
    layer = LayerCache(keys.k, keys.v, keys.k_scale, keys.v_scale)
    out, lse = paged_attention_with_lse(
        queries.q, layer, metadata, scale=options.scale, window=options.window, softcap=options.softcap,
        alibi_slopes=options.alibi_slopes, right=options.right, sinks=options.sinks,
        num_splits=call.num_splits,
    )  # fmt: skip
    return (out, lse) if queries.used is None else _hide_unused(out, lse, queries, options.sinks)


def _metadata(call: Call, queries: RaggedQueries) -> AttentionMetadata:
    """Return the step; on a CPU this checks its lengths and whether its plan is for them."""
    keys = call.keys
    return AttentionMetadata(
        cu_seqlens_q=queries.cu_seqlens,
        seq_lens=keys.seq_lens,
        positions=queries.positions,
        # Attention stores nothing, so no slot is needed.
        slot_mapping=queries.positions,
        block_table=keys.block_table,
        max_query_len=queries.max_len,
        max_seq_len=keys.capacity,
        work=call.plan,
        kv_begin=keys.begin,
        may_be_short=True,
    )


def _ragged(queries: Queries, seq_lens: Tensor) -> RaggedQueries:
    """Do what Queries.ragged does, on a GPU in one launch where queries differ in length."""
    if queries.cu_seqlens is None or not is_on_gpu(queries.q):
        return queries.ragged(seq_lens)
    from octavo.ops.triton.positions import ragged_positions

    cu_seqlens, used = queries.cu_seqlens, queries.used
    positions = ragged_positions(queries.q.shape[0], cu_seqlens, seq_lens, used)
    return RaggedQueries(queries.q, cu_seqlens, positions, used, queries.max_len)


def _attend_used(call: Call) -> tuple[Tensor, Tensor]:
    """Attend only the queries that count, on a CPU: a plan would place the unused ones at the last keys."""
    debug.check_call(call)
    (token, used), (out, lse) = _used_queries(call), _nothing(call)
    out[token], lse[token] = attend(call._replace(queries=used))
    return out, lse


def _used_queries(call: Call) -> tuple[Tensor, Queries]:
    """Return (rows of q that count, a batch of these alone); on a CPU, with checked lengths."""
    queries = call.queries.ragged(call.keys.seq_lens)
    assert queries.used is not None
    lens, begin = queries.used.long(), queries.cu_seqlens[:-1].long()
    bounds = functional.pad(lens.cumsum(0), (1, 0))
    token = torch.arange(int(bounds[-1]), device=begin.device) + (begin - bounds[:-1]).repeat_interleave(lens)
    max_len = int(lens.max()) if lens.shape[0] else 0
    return token, Queries(queries.q[token], bounds.int(), None, max_len, 0)


def _nothing(call: Call) -> tuple[Tensor, Tensor]:
    """Return the results of queries that see no key."""
    q = call.queries.q
    out = torch.zeros(*q.shape[:2], call.keys.v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    return add_sinks(out, lse, call.scores.sinks, q.dtype)


def _even(keys: Keys) -> Keys:
    """Return a float8 cache with even head dims and strides, for kernels that read pairs; or a copy."""
    if keys.k.dtype != FLOAT8:
        return keys
    return keys._replace(k=_even_cache(keys.k), v=_even_cache(keys.v))


def _even_cache(cache: Tensor) -> Tensor:
    if cache.shape[3] % 2:
        return functional.pad(cache.view(torch.uint8), (0, 1)).view(FLOAT8)
    is_even = not any(number % 2 for number in (cache.storage_offset(), *cache.stride()[:3]))
    return cache if is_even else cache.clone(memory_format=torch.contiguous_format)


def _positive(queries: Queries, scale: float) -> tuple[Queries, float]:
    """Return queries and a positive scale, which some kernels need, with the same scores."""
    if scale > 0:
        return queries, scale
    if scale == 0:
        return queries.replaced(torch.zeros_like(queries.q)), 1.0
    return queries.replaced(-queries.q), -scale


def _hide_unused(
    out: Tensor, lse: Tensor, queries: RaggedQueries, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Give the queries of each sequence that do not count what those get that see no key."""
    assert queries.used is not None
    token = torch.arange(out.shape[0], dtype=torch.int32, device=out.device)
    row = rows_of(queries.cu_seqlens, token)
    unused = (token - queries.cu_seqlens[row] >= queries.used[row]).unsqueeze(1)
    nothing = -torch.inf if sinks is None else sinks.to(lse.dtype)
    return out.masked_fill(unused.unsqueeze(2), 0.0), torch.where(unused, nothing, lse)
