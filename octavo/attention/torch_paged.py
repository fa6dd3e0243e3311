"""Paged attention in vectorised PyTorch, for any device and dtype. Used where no compiled kernel can run."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.attention.cache import LayerCache, read_rows, scale_of, write_rows
from octavo.attention.checks import check_blocks, check_mask, check_plan, check_slots, check_work
from octavo.attention.lengths import check_capacity, concatenated_ranges
from octavo.attention.merge import add_sinks
from octavo.attention.metadata import AttentionMetadata
from octavo.attention.plan.host_plan import ForestPlan
from octavo.attention.score_options import ScoreOptions

# Keys per piece of work, and the largest number of scores in memory at a time (float32: 16 MiB).
_TILE_KEYS = 64
_CHUNK_SCORES = 4 << 20


def store_kv(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its slot, in place; see octavo.attention.store_kv."""
    num_blocks, block_size = cache.k.shape[:2]
    check_slots(slot_mapping, num_blocks * block_size)
    tokens = torch.nonzero(slot_mapping >= 0).squeeze(1)
    slots = slot_mapping[tokens].long()
    index = (slots // block_size, slots % block_size)
    write_rows(cache.k, index, k[tokens], cache.k_scale)
    write_rows(cache.v, index, v[tokens], cache.v_scale)


def host_plan(
    num_query_tokens: int,
    block_size: int,
    metadata: AttentionMetadata,
    right: int | None = 0,
    window: int | None = None,
) -> ForestPlan:
    """Return the step's plan, or make one without sharing (which on a GPU waits for the device).

    right, window: of the call; its plan must list all that it sees. One that is made here lists all keys, so
    that kernels name a block that does not exist also where a window hides it.

    Raises:
        InvalidArgumentError: the sequences do not fit q or the block table, or the work is a DeviceForest.
    """
    check_work(metadata.work, "torch")
    if metadata.plan is not None:
        check_mask(metadata.plan, right, window)
        return metadata.plan
    seq_lens, cu_seqlens_q = metadata.seq_lens.cpu().numpy(), metadata.cu_seqlens_q.cpu().numpy()
    # Lengths are checked before the plan is made: a corrupt one would make millions of items.
    check_capacity(int(seq_lens.max(initial=0)), block_size, metadata.block_table)
    kv_begin = None if metadata.kv_begin is None else metadata.kv_begin.cpu().numpy()
    plan = ForestPlan.flat(
        seq_lens, cu_seqlens_q, right=right, kv_begin=kv_begin, may_be_short=metadata.may_be_short
    )
    check_plan(plan, num_query_tokens, block_size, metadata)
    return plan


def paged_attention_with_lse(
    q: Tensor, cache: LayerCache, metadata: AttentionMetadata, options: ScoreOptions
) -> tuple[Tensor, Tensor]:
    """Attend by the step's plan; see octavo.attention.paged_attention_with_lse.

    The plan's items are cut into pieces of 64 keys. Pieces with a similar number of query tokens form batched
    GEMMs. Each result is folded into its tokens' running softmax, so memory stays bounded. Autocast
    changes nothing.
    """
    plan = host_plan(q.shape[0], cache.k.shape[1], metadata, options.right, options.window)
    _check_segments(plan, metadata.block_table, cache.k)
    with torch.autocast(q.device.type, enabled=False):
        state = _RunningSoftmax(q, cache.v.shape[3])
        for tokens, rows, kv_begin, kv_end in _batches(plan, q, cache.k):
            pieces = _see(tokens, rows, kv_begin, kv_end, metadata, options)
            if pieces.rows.shape[0] > 0:
                _fold(state, pieces, cache, metadata.block_table, options)
        return add_sinks(*state.result(), options.sinks, q.dtype)


def _check_segments(plan: ForestPlan, block_table: Tensor, k_cache: Tensor) -> None:
    """Check the ids of all blocks that the plan reads; skipped on a GPU."""
    num_blocks, block_size = k_cache.shape[:2]
    begin = plan.item_kv_begin // block_size
    lengths = np.where(plan.item_kv_end > plan.item_kv_begin, -(-plan.item_kv_end // block_size) - begin, 0)
    columns = torch.from_numpy(concatenated_ranges(begin, lengths))
    rows = torch.from_numpy(np.repeat(plan.item_table_row, lengths).astype(np.int64))
    check_blocks(block_table, rows, columns, num_blocks)


class _RunningSoftmax:
    """Running maximum, sum and weighted values of every token and head; row T is for padding.

    Specification: octavo.attention.merge. It folds scores, not finished partial results, so that memory does
    not grow with the number of pieces.
    """

    def __init__(self, q: Tensor, value_dim: int) -> None:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        num_tokens, num_heads, head_dim = q.shape
        self.q = torch.cat([q, q.new_zeros(1, num_heads, head_dim)]).to(dtype)
        self.maximum = torch.full((num_tokens + 1, num_heads), -torch.inf, dtype=dtype, device=q.device)
        self.total = torch.zeros_like(self.maximum)
        self.values = self.q.new_zeros(num_tokens + 1, num_heads, value_dim)

    def raise_maximum(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """Fold scores [X, n, H, keys] into the maxima of tokens [X, n]; return exp(scores - maximum)."""
        index = tokens.flatten().unsqueeze(1).expand(-1, self.maximum.shape[1])
        piece_maximum = scores.amax(dim=-1).flatten(0, 1)
        raised = self.maximum.scatter_reduce(0, index, piece_maximum, reduce="amax")
        # A token that has seen nothing yet keeps -inf; from 0 its weights are exp(-inf) = 0.
        base = raised.masked_fill(raised == -torch.inf, 0.0)
        correction = torch.exp(self.maximum - base)
        self.total *= correction
        self.values *= correction.unsqueeze(-1)
        self.maximum = raised
        return torch.exp(scores - base[tokens].unsqueeze(-1))

    def add(self, tokens: Tensor, weights: Tensor, weighted_values: Tensor) -> None:
        """Add weights [X, n, H, keys] and their weighted values [X, n, H, Dv] to tokens [X, n]."""
        self.total.index_add_(0, tokens.flatten(), weights.sum(dim=-1).flatten(0, 1))
        self.values.index_add_(0, tokens.flatten(), weighted_values.flatten(0, 1))

    def result(self) -> tuple[Tensor, Tensor]:
        """Return (out [T, H, Dv] in the dtype of the computation, lse [T, H] float32); no padding row."""
        total, maximum = self.total[:-1], self.maximum[:-1]
        out = self.values[:-1] / torch.where(total == 0, 1.0, total).unsqueeze(-1)
        lse = torch.where(total == 0, -torch.inf, maximum + torch.log(total))
        return out, lse.float()


def _batches(plan: ForestPlan, q: Tensor, k_cache: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield (tokens [X, n], table rows [X], kv begin [X], kv end [X]) of pieces, on the device of q.

    Query tiles are padded with token T to a power of two, so less than half of a batch is padding.
    """
    num_item_tokens = np.diff(plan.item_token_begin)
    widths = 1 << np.ceil(np.log2(np.maximum(num_item_tokens, 1))).astype(np.int64)
    for width in np.unique(widths[num_item_tokens > 0]):
        items = np.flatnonzero((widths == width) & (num_item_tokens > 0))
        item, begin, end = _pieces(plan, items)
        per_piece = int(width) * q.shape[1] * _TILE_KEYS + 2 * _TILE_KEYS * k_cache[0, 0].numel()
        chunk = max(1, _CHUNK_SCORES // per_piece)
        for at in range(0, item.shape[0], chunk):
            part = slice(at, at + chunk)
            tokens = _padded_tokens(plan, item[part], int(width), q.shape[0])
            arrays = (tokens, plan.item_table_row[item[part]], begin[part], end[part])
            yield tuple(torch.from_numpy(array.astype(np.int64)).to(q.device) for array in arrays)


def _pieces(plan: ForestPlan, items: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut items at multiples of _TILE_KEYS; return (item, kv begin, kv end), all [X]."""
    begin, end = plan.item_kv_begin[items].astype(np.int64), plan.item_kv_end[items].astype(np.int64)
    first_tile = begin // _TILE_KEYS
    num_pieces = np.where(end > begin, -(-end // _TILE_KEYS) - first_tile, 0)
    owner = np.repeat(np.arange(items.shape[0]), num_pieces)
    tile = concatenated_ranges(first_tile, num_pieces)
    piece_begin = np.maximum(tile * _TILE_KEYS, begin[owner])
    piece_end = np.minimum((tile + 1) * _TILE_KEYS, end[owner])
    return items[owner], piece_begin, piece_end


def _padded_tokens(plan: ForestPlan, items: np.ndarray, width: int, padding: int) -> np.ndarray:
    begin, end = plan.item_token_begin[items, None], plan.item_token_begin[items + 1, None]
    index = begin + np.arange(width)
    tokens = plan.item_tokens[np.minimum(index, end - 1)]
    return np.where(index < end, tokens, padding)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """X pieces of work: the query tokens tokens[x] see the keys keys_at[x] of the sequence rows[x].

    Attributes:
        tokens: [X, n], padded with T.
        rows: [X] block-table rows.
        keys_at: [X, keys] positions of keys, all of which may be read.
        distance: [X, n, keys] query position minus key position.
        visible: [X, n, keys] bool.
    """

    tokens: Tensor
    rows: Tensor
    keys_at: Tensor
    distance: Tensor
    visible: Tensor


def _see(
    tokens: Tensor,
    rows: Tensor,
    kv_begin: Tensor,
    kv_end: Tensor,
    metadata: AttentionMetadata,
    options: ScoreOptions,
) -> _Pieces:
    """Compute which query token sees which key; pieces in which no key is visible are dropped."""
    keys_at = kv_begin.unsqueeze(1) + torch.arange(_TILE_KEYS, device=tokens.device)
    num_tokens = metadata.positions.shape[0]
    positions = torch.cat([metadata.positions, metadata.positions.new_full((1,), -1)])[tokens]
    distance = positions.unsqueeze(-1) - keys_at.unsqueeze(1)
    visible = (tokens < num_tokens).unsqueeze(-1) & (keys_at < kv_end.unsqueeze(1)).unsqueeze(1)
    if options.right is not None:
        visible &= distance >= -options.right
    if options.window is not None:
        visible &= distance < options.window
    seen = visible.any(dim=1)
    # A key that no token sees may lie past the end or hold NaN, so a visible key is read in its place.
    keys_at = torch.where(seen, keys_at, kv_begin.unsqueeze(1) + seen.int().argmax(dim=1, keepdim=True))
    keep = torch.nonzero(seen.any(dim=1)).squeeze(1)
    return _Pieces(tokens[keep], rows[keep], keys_at[keep], distance[keep], visible[keep])


def _fold(
    state: _RunningSoftmax, pieces: _Pieces, cache: LayerCache, block_table: Tensor, options: ScoreOptions
) -> None:
    """Attend each piece's tokens to its keys and fold the result into the tokens' running softmax."""
    _, block_size, num_kv_heads, head_dim = cache.k.shape
    block_ids = block_table[pieces.rows.unsqueeze(1), pieces.keys_at // block_size].long()
    offsets = pieces.keys_at % block_size
    k_scale, v_scale = (scale_of(scale, pieces.rows) for scale in (cache.k_scale, cache.v_scale))
    keys = read_rows(cache.k, (block_ids, offsets), state.q.dtype, k_scale)
    values = read_rows(cache.v, (block_ids, offsets), state.q.dtype, v_scale)
    num_pieces, width = pieces.tokens.shape
    # [X, KH, n * G, D]: the query heads of one kv head become rows of one product.
    q = state.q[pieces.tokens].view(num_pieces, width, num_kv_heads, -1, head_dim)
    q = q.transpose(1, 2).reshape(num_pieces, num_kv_heads, -1, head_dim)
    scores = _to_token_major(q @ keys.permute(0, 2, 3, 1) * options.scale, width)
    scores = _apply_options(scores, pieces, options)
    weights = state.raise_maximum(pieces.tokens, scores)
    weighted = _to_head_major(weights, num_kv_heads) @ values.transpose(1, 2)
    state.add(pieces.tokens, weights, _to_token_major(weighted, width))


def _apply_options(scores: Tensor, pieces: _Pieces, options: ScoreOptions) -> Tensor:
    """Cap, bias and mask the scores of pieces, [X, n, H, keys]."""
    if options.softcap > 0:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.to(scores.dtype)
        if slopes.dim() == 2:
            slopes = slopes[pieces.rows].unsqueeze(1)
        scores = scores - slopes.unsqueeze(-1) * pieces.distance.abs().unsqueeze(2)
    return scores.masked_fill(~pieces.visible.unsqueeze(2), -torch.inf)


def _to_token_major(x: Tensor, width: int) -> Tensor:
    """Return x [X, KH, n * G, Y] as [X, n, KH * G, Y]."""
    num_pieces, num_kv_heads, _, size = x.shape
    return x.view(num_pieces, num_kv_heads, width, -1, size).transpose(1, 2).flatten(2, 3)


def _to_head_major(x: Tensor, num_kv_heads: int) -> Tensor:
    """Return x [X, n, KH * G, Y] as [X, KH, n * G, Y]."""
    num_pieces, width, _, size = x.shape
    return x.view(num_pieces, width, num_kv_heads, -1, size).transpose(1, 2).flatten(2, 3)
