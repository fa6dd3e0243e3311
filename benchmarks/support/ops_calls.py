"""Calls of octavo.ops and of FlashAttention-3 on the same tensors, over several caches of one workload."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from peers.flash_attention_3 import Lengths, NewKeys, Places, attend_flash_attention_3, store_as_vllm
from torch import Tensor

from octavo.ops import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

if TYPE_CHECKING:
    from gpu_attention import Workload

# Attends over the cache of this number; returns a tensor [T, H, D] or [S, Q, H, D].
Attend = Callable[[int], Any]

# The largest page, which the capacity of a sequence is a multiple of.
LARGEST_PAGE = 256


@dataclass(frozen=True, slots=True)
class Inputs:
    """Random tensors of a workload, bfloat16 but for lengths.

    Attributes:
        q: [S, Q, H, D].
        k, v: [C, S, capacity, KH, D], C caches.
        new: keys and values [S, Q, KH, D] to append, and angles [capacity, D / 2].
        seq_lens: [S] int32, keys of each sequence, new ones included.
        cu_seqlens_q, cu_seqlens_k: [S + 1] int32; the latter of the capacities.
    """

    workload: "Workload"
    q: Tensor
    k: Tensor
    v: Tensor
    new: NewKeys
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor

    @property
    def num_caches(self) -> int:
        return self.k.shape[0]

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5


@dataclass(frozen=True, slots=True)
class Pages:
    """The caches of inputs in pages of one size.

    Attributes:
        k, v: [N, page, KH, D].
        tables: of each cache, [S, columns] int32; pages lie in random order.
        positions: [T] int64 of the new tokens.
        slots: of each cache, those of the new tokens, [T] int64.
    """

    k: Tensor
    v: Tensor
    tables: tuple[Tensor, ...]
    positions: Tensor
    slots: tuple[Tensor, ...]


def kv_bytes(workload: "Workload") -> int:
    """Bytes of one cache's visible keys and values."""
    return 4 * sum(workload.seq_lens) * workload.kv_heads * workload.head_dim


def count_caches(workload: "Workload", l2_bytes: int, most: int = 100) -> int:
    """How many caches exceed the L2 three times."""
    return min(most, math.ceil(3 * l2_bytes / kv_bytes(workload)))


def make_inputs(workload: "Workload", num_caches: int, device: str) -> Inputs:
    """Draw the tensors of a workload."""
    batch, query_len, kv_heads = workload.batch, workload.query_len, workload.kv_heads
    capacity = -(-workload.seq_len // LARGEST_PAGE) * LARGEST_PAGE
    draw = partial(torch.randn, dtype=torch.bfloat16, device=device)
    frequency = 1e4 ** -torch.linspace(0, 1, workload.head_dim // 2, device=device)
    angles = torch.arange(capacity, device=device)[:, None] * frequency
    count = torch.arange(batch + 1, dtype=torch.int32, device=device)
    k_new, v_new = (draw(batch, query_len, kv_heads, workload.head_dim) for _ in range(2))
    k, v = (draw(num_caches, batch, capacity, kv_heads, workload.head_dim) for _ in range(2))
    return Inputs(
        workload,
        q=draw(batch, query_len, workload.heads, workload.head_dim),
        k=k,
        v=v,
        new=NewKeys(k_new, v_new, angles.cos().bfloat16(), angles.sin().bfloat16()),
        seq_lens=torch.tensor(workload.seq_lens, dtype=torch.int32, device=device),
        cu_seqlens_q=count * query_len,
        cu_seqlens_k=count * capacity,
    )


def make_pages(inputs: Inputs, page: int) -> Pages:
    """Cut the caches into pages and deal each cache's to its sequences."""
    workload, (num_caches, batch, capacity) = inputs.workload, inputs.k.shape[:3]
    device, per_cache = inputs.k.device, batch * capacity // page
    ids = [torch.randperm(per_cache, device=device) + c * per_cache for c in range(num_caches)]
    columns = -(-workload.seq_len // page)
    tables = [own.view(batch, -1)[:, :columns].int().contiguous() for own in ids]
    new = inputs.seq_lens.long()[:, None] + torch.arange(-workload.query_len, 0, device=device)
    slots = [(table.gather(1, new // page).long() * page + new % page).flatten() for table in tables]
    k, v = (cache.view(-1, page, *cache.shape[3:]) for cache in (inputs.k, inputs.v))
    return Pages(k, v, tuple(tables), new.flatten(), tuple(slots))


def octavo_call(form: str, inputs: Inputs, pages: Pages | None) -> Attend:
    """Return a call of octavo.ops."""
    q, new, seq_lens = inputs.q, inputs.new, inputs.seq_lens
    query_len, seq_len = inputs.workload.query_len, inputs.workload.seq_len
    ragged = partial(
        *(flash_attn_varlen_func, q.flatten(0, 1)),
        cu_seqlens_q=inputs.cu_seqlens_q,
        max_seqlen_q=query_len,
        max_seqlen_k=seq_len,
        causal=True,
    )
    if pages is None and form == "dense":
        return lambda c: flash_attn_func(q, inputs.k[c], inputs.v[c], causal=True)
    if pages is None:
        keys = [(inputs.k[c].flatten(0, 1), inputs.v[c].flatten(0, 1)) for c in range(inputs.num_caches)]
        return lambda c: ragged(k=keys[c][0], v=keys[c][1], cu_seqlens_k=inputs.cu_seqlens_k)
    k, v, tables = pages.k, pages.v, pages.tables
    if query_len > 1:
        return lambda c: ragged(k=k, v=v, seqused_k=seq_lens, block_table=tables[c])
    if form == "paged":
        attend = partial(flash_attn_with_kvcache, q, k, v, cache_seqlens=seq_lens, causal=True)
        return lambda c: attend(block_table=tables[c])
    append = partial(
        *(flash_attn_with_kvcache, q, k, v, new.k, new.v, new.cos, new.sin, seq_lens - query_len),
        causal=True,
        rotary_interleaved=False,
    )
    return lambda c: append(block_table=tables[c])


def fa3_call(form: str, inputs: Inputs, pages: Pages | None) -> Attend:
    """Return a call of FlashAttention-3; dense keys go as ragged ones, the only ones vLLM builds it for."""
    q, workload = inputs.q.flatten(0, 1), inputs.workload
    make_lengths = partial(Lengths, inputs.cu_seqlens_q, workload.query_len, workload.seq_len)
    if pages is None:
        lengths = make_lengths(cu_seqlens_k=inputs.cu_seqlens_k)
        keys = [(inputs.k[c].flatten(0, 1), inputs.v[c].flatten(0, 1)) for c in range(inputs.num_caches)]
        return lambda c: attend_flash_attention_3(q, *keys[c], lengths, None, inputs.scale)
    k, v, tables = pages.k, pages.v, pages.tables
    new = inputs.new if form == "append" else None
    lengths = make_lengths(seqused_k=inputs.seq_lens - (0 if new is None else workload.query_len))
    return lambda c: attend_flash_attention_3(q, k, v, lengths, tables[c], inputs.scale, new)


def apart_call(inputs: Inputs, pages: Pages, store: Callable[..., None] = store_as_vllm) -> Attend:
    """Return `store` and then FlashAttention-3; q and the new keys are rotated in place."""
    new = inputs.new
    q, k_new, v_new = (x.flatten(0, 1).clone() for x in (inputs.q, new.k, new.v))
    lengths = Lengths(
        inputs.cu_seqlens_q, inputs.workload.query_len, inputs.workload.seq_len, inputs.seq_lens
    )
    cos_sin, one = torch.cat([new.cos, new.sin], -1), torch.ones(1, device=q.device)
    places = [Places(pages.positions, slots, cos_sin, one) for slots in pages.slots]

    def attend(c: int) -> Tensor:
        store(q, k_new, v_new, (pages.k, pages.v), places[c])
        return attend_flash_attention_3(q, pages.k, pages.v, lengths, pages.tables[c], inputs.scale)

    return attend
