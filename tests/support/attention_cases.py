"""Random ragged batches over a paged cache, and a dense float64 oracle that shares no code with Octavo."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from octavo.attention import (
    AttentionMetadata,
    ForestPlan,
    KVCache,
    LayerCache,
    paged_attention_with_lse,
    store_kv,
)
from octavo.attention.plan.prefix_forest import Costs

KERNELS = ("reference", "torch", "c")
ALWAYS_SHARE = Costs(partial_tokens=0.0, node_tokens=0.0)


@dataclass
class Case:
    """A step whose cache holds NaN wherever no sequence's token lies."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    metadata: AttentionMetadata

    @property
    def cache(self):
        return LayerCache(self.k_cache, self.v_cache)

    def run(self, impl, plan=None, k_scale=None, v_scale=None, **options):
        cache = LayerCache(self.k_cache, self.v_cache, k_scale, v_scale)
        metadata = replace(self.metadata, work=plan)
        options.setdefault("scale", self.q.shape[-1] ** -0.5)
        return paged_attention_with_lse(self.q, cache, metadata, impl=impl, **options)

    def oracle(self, **options):
        return dense_oracle(self, **options)

    def forest(self, costs=ALWAYS_SHARE, **options):
        metadata = self.metadata
        return ForestPlan.from_block_tables(
            metadata.block_table.numpy(),
            metadata.seq_lens.numpy(),
            metadata.cu_seqlens_q.numpy(),
            self.k_cache.shape[1],
            costs=costs,
            **options,
        )


def make_case(
    seq_lens,
    query_lens,
    *,
    heads=4,
    kv_heads=2,
    head_dim=16,
    value_dim=None,
    block_size=16,
    dtype=torch.float32,
    rows=None,
    seed=0,
    kv_begin=None,
):
    """Fill a NaN cache through store_kv. rows: block ids by sequence (equal = shared); default: disjoint."""
    generator = torch.Generator().manual_seed(seed)
    table, num_blocks = _block_table(seq_lens, block_size, rows, generator)
    cache = KVCache.allocate(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    cache.data.fill_(torch.nan)
    layer = cache.layer(0)
    k_cache, v_cache = layer.k, layer.v
    value_dim = head_dim if value_dim is None else value_dim
    if value_dim != head_dim:
        v_cache = k_cache.new_full((*k_cache.shape[:3], value_dim), torch.nan)
        layer = LayerCache(k_cache, v_cache)
    first_keys = [0] * len(seq_lens) if kv_begin is None else kv_begin
    for row, seq_len, first in zip(table, seq_lens, first_keys, strict=True):
        slots = (
            row.long()[torch.arange(seq_len) // block_size] * block_size + torch.arange(seq_len) % block_size
        )
        # Shared blocks are written again by each sharer, the first time only.
        fresh = k_cache[slots // block_size, slots % block_size, 0, 0].isnan()
        k, v = torch.randn(2, seq_len, kv_heads, max(head_dim, value_dim), generator=generator).to(dtype)
        # What lies before the first key stays NaN.
        fresh &= torch.arange(seq_len) >= first
        store_kv(k[..., :head_dim], v[..., :value_dim], layer, torch.where(fresh, slots, -1), impl="torch")
    positions = [torch.arange(n - q, n) for n, q in zip(seq_lens, query_lens, strict=True)]
    cu_seqlens_q = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    num_tokens = int(cu_seqlens_q[-1])
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.from_numpy(cu_seqlens_q),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        positions=torch.cat([*positions, torch.zeros(0)]).int(),
        slot_mapping=torch.full((num_tokens,), -1),
        block_table=table,
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
        kv_begin=None if kv_begin is None else torch.tensor(kv_begin, dtype=torch.int32),
    )
    q = torch.randn(num_tokens, heads, head_dim, generator=generator).to(dtype)
    return Case(q, k_cache, v_cache, metadata)


def with_bfloat16_cache(case):
    """The case with its cache rounded to bfloat16; [N, KH, B, D] in memory, what nobody wrote stays NaN."""
    k_cache, v_cache = (cache.to(torch.bfloat16) for cache in (case.k_cache, case.v_cache))
    return replace(case, k_cache=k_cache, v_cache=v_cache)


def make_float8_case(seq_lens, query_lens, *, kv_heads=2, **shape):
    """make_case with a float8 cache; returns it and (k_scale, v_scale) [KH] to read it with."""
    case = make_case(seq_lens, query_lens, kv_heads=kv_heads, **shape)
    # Keeps [N, KH, B, D] in memory; what nobody wrote stays NaN.
    k_cache, v_cache = (cache.to(torch.float8_e4m3fn) for cache in (case.k_cache, case.v_cache))
    scales = torch.linspace(0.5, 1.5, 2 * kv_heads).view(2, kv_heads)
    return replace(case, k_cache=k_cache, v_cache=v_cache), (scales[0], scales[1])


def _block_table(seq_lens, block_size, rows, generator):
    """Entries past a sequence's end are -1, or an id far outside of the pool."""
    counts = [-(-n // block_size) for n in seq_lens]
    if rows is None:
        ids = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        rows = [[ids.pop() for _ in range(count)] for count in counts]
        num_blocks = sum(counts) + 2
    else:
        num_blocks = max((max(row, default=0) for row in rows), default=0) + 1
    table = torch.full((len(rows), max(counts, default=0) + 2), -1, dtype=torch.int32)
    table[:, -1] = 1 << 30
    for row, ids in zip(table, rows, strict=True):
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return table, num_blocks


def dense_oracle(case, *, scale=None, window=None, softcap=0.0, alibi_slopes=None, right=0, sinks=None):
    """Every (token, head) on its own, in NumPy float64. Returns (out [T, H, Dv], lse [T, H])."""
    q = case.q.double().numpy()
    k_cache, v_cache = case.k_cache.double().numpy(), case.v_cache.double().numpy()
    num_heads, head_dim = q.shape[1:]
    scale = head_dim**-0.5 if scale is None else scale
    block_size, num_kv_heads = k_cache.shape[1:3]
    out, lse = np.zeros((*q.shape[:2], v_cache.shape[3])), np.full(q.shape[:2], -np.inf)
    metadata = case.metadata
    for s in range(metadata.seq_lens.shape[0]):
        for token in range(int(metadata.cu_seqlens_q[s]), int(metadata.cu_seqlens_q[s + 1])):
            p = int(metadata.positions[token])
            first = 0 if window is None else max(0, p - window + 1)
            if metadata.kv_begin is not None:
                first = max(first, int(metadata.kv_begin[s]))
            end = int(metadata.seq_lens[s])
            at = np.arange(first, end if right is None else min(p + right + 1, end))
            if at.size == 0:
                lse[token] = lse[token] if sinks is None else sinks.double().numpy()
                continue
            blocks = metadata.block_table[s].numpy()[at // block_size]
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                scores = k_cache[blocks, at % block_size, kv_head] @ q[token, head] * scale
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                if alibi_slopes is not None:
                    slopes = alibi_slopes[s] if alibi_slopes.dim() == 2 else alibi_slopes
                    scores = scores - float(slopes[head]) * abs(p - at)
                top = scores.max() if sinks is None else max(scores.max(), float(sinks[head]))
                weights = np.exp(scores - top)
                total = weights.sum() + (0.0 if sinks is None else np.exp(float(sinks[head]) - top))
                out[token, head] = weights @ v_cache[blocks, at % block_size, kv_head] / total
                lse[token, head] = top + np.log(total)
    return torch.from_numpy(out), torch.from_numpy(lse)


def assert_accurate(case, impl, plan=None, **options):
    """err(kernel) <= 2 x err(plain torch in the same dtype) + eps, against the float64 oracle; no NaN."""
    out, lse = case.run(impl, plan, **options)
    exact_out, exact_lse = case.oracle(**options)
    plain_out, plain_lse = case.run("reference", **options)
    eps = 4 * torch.finfo(case.q.dtype).eps
    assert not out.isnan().any()
    assert not lse.isnan().any()
    assert out.dtype == case.q.dtype
    assert lse.dtype == torch.float32
    assert_error(out, exact_out, plain_out, eps)
    assert_error(lse, exact_lse, plain_lse, 4 * torch.finfo(torch.float32).eps * (1 + finite_max(exact_lse)))


def assert_error(actual, exact, plain, eps):
    empty = exact == -torch.inf
    assert torch.equal(actual == -torch.inf, empty)
    error = (actual.double() - exact).masked_fill(empty, 0).abs().max() if actual.numel() else 0.0
    bound = (plain.double() - exact).masked_fill(empty, 0).abs().max() if actual.numel() else 0.0
    assert error <= 2 * bound + eps, f"error {error:.2e}, plain torch {bound:.2e}"


def finite_max(x):
    finite = x[x > -torch.inf]
    return float(finite.abs().max()) if finite.numel() else 0.0


def hide_unseen(case, window, seed=0):
    """The case as a cache with windows leaves it: what no query sees holds NaN, whole blocks of it are gone.

    Entries of the block table before the first block that a sequence sees name any block, mostly one of NaN.
    """
    metadata, block_size = case.metadata, case.k_cache.shape[1]
    num_spare, num_blocks = 3, case.k_cache.shape[0]
    shape = (num_blocks + num_spare, *case.k_cache.shape[1:])
    seen = torch.zeros(shape[:2], dtype=torch.bool)
    table, generator = metadata.block_table.clone(), torch.Generator().manual_seed(seed)
    for s, seq_len in enumerate(metadata.seq_lens.tolist()):
        query_len = int(metadata.cu_seqlens_q[s + 1] - metadata.cu_seqlens_q[s])
        if seq_len == 0 or query_len == 0:
            continue
        key = torch.arange(max(0, seq_len - query_len - window + 1), seq_len)
        seen[table[s, key // block_size].long(), key % block_size] = True
        gone = int(key[0]) // block_size
        table[s, :gone] = torch.randint(num_blocks, shape[0], (gone,), generator=generator).int()
        if gone and seed % 2:
            table[s, int(torch.randint(gone, (1,), generator=generator))] = int(table[s, gone])

    def hide(cache):
        # [N, KH, B, D] in memory, as KVCache has it.
        hidden = cache.new_full((shape[0], shape[2], shape[1], shape[3]), torch.nan).transpose(1, 2)
        hidden[:num_blocks] = cache
        return hidden.masked_fill_(~seen[:, :, None, None], torch.nan)

    return Case(case.q, hide(case.k_cache), hide(case.v_cache), replace(metadata, block_table=table))
