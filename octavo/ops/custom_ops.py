"""octavo::append and octavo::attend, the two torch operators that a compiled graph holds.

The public functions normalise in Python, which torch.compile traces, and then call these. Outside of a
compiled graph they call append and attend directly: the dispatcher would cost more than a small call.
"""

import torch
from torch import Tensor

from octavo.attention.checks import check_forward_only
from octavo.errors import InvalidArgumentError
from octavo.ops import append as eager_append
from octavo.ops import attend as eager_attend
from octavo.ops.call import Call, Keys, NewKeys, Queries, Rotary, Scores


@torch.library.custom_op("octavo::append", mutates_args=("k_cache", "v_cache"))
def append_op(
    q: Tensor, cu_seqlens_q: Tensor | None, used_q: Tensor | None, length_q: int, k: Tensor, v: Tensor,
    cu_seqlens_k: Tensor | None, length_k: int, cached_lens: Tensor, begin: Tensor | None,
    block_table: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None,
    offsets: Tensor | None = None, interleaved: bool = False, queries_advance: bool = False,
) -> Tensor:  # fmt: skip
    """See octavo.ops.append.append; returns the rotated queries, without rotary embedding an empty tensor."""
    check_forward_only(q, k, v, k_cache, v_cache, k_scale, v_scale, cos, sin)
    queries = Queries(q, cu_seqlens_q, used_q, q.shape[0], length_q)
    new = NewKeys(k, v, cu_seqlens_k, length_k, cached_lens, begin, block_table, k_scale, v_scale)
    rotary = None
    if cos is not None and sin is not None and offsets is not None:
        rotary = Rotary(cos, sin, interleaved, offsets, queries_advance)
    rotated, _ = eager_append.append(queries, new, k_cache, v_cache, rotary)
    return q.new_empty(0) if rotary is None else rotated


@append_op.register_fake
def _fake_append(
    q, cu_seqlens_q, used_q, length_q, k, v, cu_seqlens_k, length_k, cached_lens, begin, block_table,
    k_cache, v_cache, k_scale=None, v_scale=None, cos=None, sin=None, offsets=None, interleaved=False,
    queries_advance=False,
):  # fmt: skip
    return q.new_empty(0) if cos is None else q.new_empty(q.shape)


@torch.library.custom_op("octavo::attend", mutates_args=())
def attend_op(
    q: Tensor, cu_seqlens_q: Tensor | None, used: Tensor | None, max_len: int, length: int, k: Tensor,
    v: Tensor, block_table: Tensor, seq_lens: Tensor, begin: Tensor | None, k_scale: Tensor | None,
    v_scale: Tensor | None, scale: float, left: int | None, right: int | None, softcap: float,
    alibi_slopes: Tensor | None, sinks: Tensor | None, num_splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See octavo.ops.attend.attend."""
    check_forward_only(q, k, v, k_scale, v_scale, alibi_slopes, sinks)
    call = Call(
        Queries(q, cu_seqlens_q, used, max_len, length),
        Keys(k, v, block_table, seq_lens, begin, k_scale, v_scale),
        Scores(scale, left, right, softcap, alibi_slopes, sinks),
        num_splits,
        None,
    )
    return eager_attend.attend(call)


@attend_op.register_fake
def _fake_attend(q, cu_seqlens_q, used, max_len, length, k, v, *_options):
    num_tokens, num_heads, _ = q.shape
    out = q.new_empty(num_tokens, num_heads, v.shape[3])
    return out, q.new_empty(num_tokens, num_heads, dtype=torch.float32)


def append(
    queries: Queries, new: NewKeys, k_cache: Tensor, v_cache: Tensor, rotary: Rotary | None
) -> tuple[Tensor, Tensor]:
    """Call octavo.ops.append.append, as an operator while torch.compile traces."""
    if not torch.compiler.is_compiling():
        return eager_append.append(queries, new, k_cache, v_cache, rotary)
    rotated = append_op(
        queries.q, queries.cu_seqlens, queries.used, queries.length, new.k, new.v, new.cu_seqlens, new.length,
        new.cached_lens, new.begin, new.block_table, k_cache, v_cache, new.k_scale, new.v_scale,
        None if rotary is None else rotary.cos, None if rotary is None else rotary.sin,
        None if rotary is None else rotary.offsets, rotary is not None and rotary.interleaved,
        rotary is not None and rotary.queries_advance,
    )  # fmt: skip
    return queries.q if rotary is None else rotated, new.lengths_after()


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Call octavo.ops.attend.attend, as an operator while torch.compile traces."""
    if not torch.compiler.is_compiling():
        return eager_attend.attend(call)
    if call.plan is not None:
        raise InvalidArgumentError("plan cannot be part of a compiled graph; leave it out, or call eagerly")
    queries, keys, scores = call.queries, call.keys, call.scores
    return attend_op(
        queries.q, queries.cu_seqlens, queries.used, queries.max_len, queries.length, keys.k, keys.v,
        keys.block_table, keys.seq_lens, keys.begin, keys.k_scale, keys.v_scale, scores.scale, scores.left,
        scores.right, scores.softcap, scores.alibi_slopes, scores.sinks, call.num_splits,
    )  # fmt: skip
