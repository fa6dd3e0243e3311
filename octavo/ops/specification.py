"""The specification of octavo.ops in plain PyTorch: sequence by sequence, float32, or float64 for float64."""

import torch
from torch import Tensor

from octavo.attention.cache import FLOAT8, read_rows
from octavo.attention.merge import add_sinks
from octavo.ops.call import Call, Keys, Scores


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Return (out [T, H, Dv], lse [T, H] float32) of a call.

    A token that sees nothing, or that does not count, gets 0 and -inf; with sinks, 0 and its sink.
    """
    keys, queries = call.keys, call.queries.ragged(call.keys.seq_lens)
    q = queries.q
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out_dtype = torch.bfloat16 if q.dtype == FLOAT8 else q.dtype
    out = torch.zeros(*q.shape[:2], keys.v.shape[3], dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    bounds = queries.cu_seqlens.tolist()
    for s in range(keys.seq_lens.shape[0]):
        num_used = bounds[s + 1] - bounds[s] if queries.used is None else int(queries.used[s])
        tokens = slice(bounds[s], bounds[s] + num_used)
        begin, k, v = _gather(keys, s, dtype)
        if num_used == 0 or k.shape[0] == 0:
            continue
        key_positions = begin + torch.arange(k.shape[0], device=q.device)
        distance = queries.positions[tokens, None] - key_positions
        slopes = call.scores.alibi_slopes
        row_slopes = slopes[s] if slopes is not None and slopes.dim() == 2 else slopes
        out[tokens], lse[tokens] = _attend(q[tokens].to(dtype), k, v, distance, call.scores, row_slopes)
    return add_sinks(out, lse, call.scores.sinks, out_dtype)


def _gather(keys: Keys, s: int, dtype: torch.dtype) -> tuple[int, Tensor, Tensor]:
    """Return (first key's position, k [K, KH, D], v [K, KH, Dv]) of sequence s."""
    block_size = keys.k.shape[1]
    begin = 0 if keys.begin is None else int(keys.begin[s])
    at = torch.arange(begin, max(begin, int(keys.seq_lens[s])), device=keys.k.device)
    index = (keys.block_table[s, at // block_size].long(), at % block_size)
    k_scale = None if keys.k_scale is None else keys.k_scale[s]
    v_scale = None if keys.v_scale is None else keys.v_scale[s]
    return begin, read_rows(keys.k, index, dtype, k_scale), read_rows(keys.v, index, dtype, v_scale)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, distance: Tensor, scores: Scores, slopes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend q [Q, H, D] to k [K, KH, D], v [K, KH, Dv] at distance [Q, K]; return (out, lse [Q, H])."""
    visible = torch.ones_like(distance, dtype=torch.bool)
    if scores.left is not None:
        visible &= distance <= scores.left
    if scores.right is not None:
        visible &= distance >= -scores.right
    # What no query sees may hold anything, even NaN, which a weight of 0 would not silence.
    unseen = ~visible.any(dim=0)[:, None, None]
    group = q.shape[1] // k.shape[1]
    k = k.masked_fill(unseen, 0.0).repeat_interleave(group, dim=1)
    v = v.masked_fill(unseen, 0.0).repeat_interleave(group, dim=1)
    weights = torch.einsum("qhd,khd->hqk", q, k) * scores.scale
    if scores.softcap > 0:
        weights = scores.softcap * torch.tanh(weights / scores.softcap)
    if slopes is not None:
        weights = weights - slopes.to(q.dtype)[:, None, None] * distance.abs()
    weights = weights.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(weights, dim=-1)
    weights = torch.exp(weights - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T.float()
