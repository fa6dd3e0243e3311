"""Random calls of flash_attn_with_kvcache: any layout of the cache, new keys, rotary embedding, float8."""

from dataclasses import dataclass, field

import torch
from ops_cases import FLOAT8, OpsCase, Sequence, rotated, slopes_of

from octavo.ops import flash_attn_with_kvcache


@dataclass
class CachedCase(OpsCase):
    """A call that may write its caches; its sequences are read from them afterwards.

    Attributes:
        rows: dense (first row, queries [Lq, H, D] float64) of each sequence.
        slots: (block [Lk], offset [Lk]) of each sequence's keys from its first to its last.
        written: (block, offset, k, v) of new keys: where they go and what they are, as float64.
        scales: (k, v) factors of what the caches hold, [B, KH] float64.
    """

    rows: list = field(default_factory=list)
    slots: list = field(default_factory=list)
    written: list = field(default_factory=list)
    scales: tuple = (None, None)

    def run(self):
        before = [self.arguments[name].clone() for name in ("k_cache", "v_cache")]
        result = super().run()
        for at, name in enumerate(("k_cache", "v_cache")):
            self._check_writes(before[at], self.arguments[name], at)
        self.sequences = [self._sequence(b) for b in range(len(self.rows))]
        return result

    def _check_writes(self, before, cache, which):
        """New keys are rounded once, from nearly the same number; nothing else changes."""
        coarse = {FLOAT8: 2**-3, torch.bfloat16: 2**-7, torch.float16: 2**-9}.get(cache.dtype, 1e-5)
        for block, offset, *new in self.written:
            stored = cache[block, offset].double()
            torch.testing.assert_close(stored, new[which], rtol=coarse, atol=max(1e-6, coarse / 64))
            before[block, offset] = cache[block, offset]
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[cache.element_size()]
        before, cache = (x.contiguous().view(kind) for x in (before, cache))
        assert torch.equal(before, cache), "a slot that no new key goes to has changed"

    def _sequence(self, b):
        first_row, q = self.rows[b]
        block, offset = self.slots[b]
        k, v = (
            self.arguments[name].contiguous()[block, offset].double()
            * (1.0 if scale is None else scale[b].unsqueeze(-1))
            for name, scale in zip(("k_cache", "v_cache"), self.scales, strict=True)
        )
        return Sequence(q, k, v, slopes_of(self.arguments, b), first_row)


def kvcache_case(maker):
    """flash_attn_with_kvcache."""
    maker.shape()
    given = maker.options()
    page = maker.page
    edge = page or 16
    pick = maker.random.choice
    is_float8 = maker.agreed_some("float8", 0.12) and maker.dtype != torch.float64
    num_new = maker.agreed("num_new", (None, None, 1, 1, 2, 5, 17))
    new_lens = _lens(maker, num_new, given, "cu_seqlens_k_new")
    query_lens = _lens(maker, maker.agreed("num_queries", (1, 1, num_new or 1, 3, 20)), given, "cu_seqlens_q")
    cached = [maker.length(edge) for _ in range(maker.batch)]
    if maker.some(0.3) or (num_new is not None and maker.some(0.2)):
        cached = [maker.length(edge)] * maker.batch
        given["cache_seqlens"] = pick((cached[0], maker.ints(cached)))
    else:
        given["cache_seqlens"] = maker.ints(cached)
    ends = [a + b for a, b in zip(cached, new_lens, strict=True)]
    pads = [0] * maker.batch
    if maker.some(0.3):
        pads = [maker.random.randint(0, n) for n in cached]
        given["cache_leftpad"] = maker.ints(pads)
    capacity = max(1, max(ends) + pick((0, 0, 5)))
    if num_new is None and page is None and maker.some(0.1):
        given["cache_seqlens"], ends = None, [capacity] * maker.batch
    case = CachedCase(flash_attn_with_kvcache, given, maker.dtype, [], 0, None)
    table = _make_caches(case, maker, page, capacity, pads, ends, is_float8)
    case.slots = [
        (
            table[b, torch.arange(pads[b], ends[b]) // (page or capacity)],
            torch.arange(pads[b], ends[b]) % (page or capacity),
        )
        for b in range(maker.batch)
    ]
    rotary = _make_new(case, maker, num_new, new_lens, cached, table, page or capacity) if num_new else None
    _make_queries(case, maker, query_lens, cached, rotary, is_float8)
    given["return_softmax_lse"] = True
    return case


def _lens(maker, length, given, name):
    """Return each sequence's number of tokens; sometimes ragged, and then named in the arguments."""
    if length is None:
        return [0] * maker.batch
    if not maker.some(0.25):
        return [length] * maker.batch
    lens = [maker.random.randint(0, length) for _ in range(maker.batch)]
    given[name] = maker.ints(torch.tensor([0, *lens]).cumsum(0).tolist())
    return lens


def _make_caches(case, maker, page, capacity, pads, ends, is_float8):
    """Fill NaN caches with each sequence's keys; return the block of each of its pages [B, W]."""
    given, block = case.arguments, page or capacity
    width = -(-capacity // block)
    num_rows = maker.batch + (2 if maker.some(0.25) else 0)
    num_blocks = num_rows * width + (0 if page is None else 2)
    ids = torch.randperm(num_blocks, generator=maker.generator)
    rows = torch.arange(num_rows)
    if num_rows > maker.batch or maker.some(0.1):
        rows = torch.randperm(num_rows, generator=maker.generator)[: maker.batch]
        given["cache_batch_idx"] = maker.ints(rows.tolist())
    full = torch.arange(num_rows)[:, None] if page is None else ids[: num_rows * width].view(num_rows, width)
    table = full[rows]
    if page is not None:
        name = maker.random.choice(("block_table", "page_table"))
        given[name] = maker.ints(full.tolist())
    dtype = FLOAT8 if is_float8 else maker.dtype
    scales = [None, None]
    for at, (name, dim) in enumerate((("k_cache", maker.head_dim), ("v_cache", maker.v_dim))):
        cache = torch.full((num_blocks, block, maker.kv_heads, dim), torch.nan, dtype=torch.float64)
        for b, (begin, end) in enumerate(zip(pads, ends, strict=True)):
            position = torch.arange(begin, end)
            cache[table[b, position // block], position % block] = maker.normal(
                end - begin, maker.kv_heads, dim
            )
        given[name] = _laid_out(maker, name, cache.to(dtype).to(maker.device))
        if is_float8 and maker.agreed_some(f"{name}_scale", 0.7):
            scale = torch.rand(maker.batch, maker.kv_heads, generator=maker.generator) + 0.5
            given[f"{name[0]}_descale"], scales[at] = scale.to(maker.device), scale.double().to(maker.device)
    case.scales = tuple(scales)
    return table


def _laid_out(maker, name, cache):
    """Return the cache with other strides now and then: heads outside of tokens, padded, or dims apart."""
    kind = maker.agreed(name, ("plain", "plain", "heads", "padded", "last"))
    raw = cache.view(torch.uint8) if cache.dtype == FLOAT8 else cache
    if kind == "heads":
        raw = raw.transpose(1, 2).contiguous().transpose(1, 2)
    elif kind == "padded":
        raw = torch.cat([raw, raw[:, :, :, :1]], dim=3)[..., : raw.shape[3]]
    elif kind == "last" and cache.dtype != FLOAT8:
        raw = raw.transpose(1, 3).contiguous().transpose(1, 3)
    return raw.view(cache.dtype) if kind != "padded" or cache.dtype != FLOAT8 else raw.view(FLOAT8)


def _make_new(case, maker, num_new, new_lens, cached, table, block):
    """Add new keys and perhaps a rotary embedding; return (cos, sin, interleaved, offsets) or None."""
    given = case.arguments
    k = maker.rows(sum(new_lens), maker.kv_heads, maker.head_dim)
    v = maker.rows(sum(new_lens), maker.kv_heads, maker.v_dim)
    rotary, largest = None, torch.finfo(FLOAT8).max
    if maker.some(0.5) and maker.head_dim > 1:
        half = maker.random.choice((maker.head_dim // 2, max(1, maker.head_dim // 4)))
        angle = torch.rand(max(cached) + num_new + 24, half, generator=maker.generator) * 6.3
        cos, sin = (x.to(maker.dtype).to(maker.device) for x in (angle.cos(), angle.sin()))
        offsets = [maker.random.randint(0, n) for n in cached] if maker.some(0.15) else cached
        if offsets is not cached:
            given["rotary_seqlens"] = maker.ints(offsets)
        rotary = (cos, sin, maker.some(0.5), offsets)
        given |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary[2]}
    begin = 0
    for b, n in enumerate(new_lens):
        position = torch.arange(cached[b], cached[b] + n)
        new_k, new_v = k[begin : begin + n], v[begin : begin + n]
        if rotary is not None:
            at = torch.arange(rotary[3][b], rotary[3][b] + n, device=maker.device)
            new_k = rotated(new_k, *rotary[:2], at, rotary[2])
        kept = [
            x.double() if scale is None else (x.double() / scale[b].unsqueeze(-1)).clamp(-largest, largest)
            for x, scale in zip((new_k, new_v), case.scales, strict=True)
        ]
        case.written.append((table[b, position // block], position % block, *kept))
        begin += n
    if "cu_seqlens_k_new" not in given:
        k, v = (x.unflatten(0, (maker.batch, num_new)) for x in (k, v))
    given |= {"k": maker.awkward("new_k", k), "v": maker.awkward("new_v", v)}
    return rotary


def _make_queries(case, maker, query_lens, cached, rotary, is_float8):
    """Add queries, and what the oracle makes of them."""
    given = case.arguments
    is_ragged = "cu_seqlens_q" in given
    q = maker.rows(sum(query_lens), maker.heads, maker.head_dim)
    factor = None
    if is_float8 and maker.agreed_some("float8_q", 0.4):
        q, case.dtype = q.to(FLOAT8), torch.bfloat16
        factor = torch.rand(maker.batch, maker.kv_heads, generator=maker.generator).to(maker.device) + 0.5
        given["q_descale"] = factor
    advance = given["causal"] or any(side >= 0 for side in given["window_size"])
    begin = 0
    for b, n in enumerate(query_lens):
        dense = q[begin : begin + n]
        dense = dense.to(case.dtype)
        if rotary is not None:
            step = torch.arange(n, device=maker.device) * int(advance)
            dense = rotated(dense, *rotary[:2], rotary[3][b] + step, rotary[2])
        dense = dense.double()
        if factor is not None:
            dense = dense * factor[b].double().repeat_interleave(maker.group).unsqueeze(-1)
        case.rows.append((begin, dense))
        begin += n
    case.num_rows = begin
    if is_ragged:
        given["max_seqlen_q"] = maker.random.choice((None, max(query_lens)))
    else:
        q = q.unflatten(0, (maker.batch, query_lens[0]))
        case.dense_rows = query_lens[0]
    given["q"] = q if q.dtype == FLOAT8 else maker.awkward("q", q)
