"""The specification of octavo.ops in plain PyTorch: sequence by sequence, float32, or float64 for float64."""

import torch
from torch import Tensor

from octavo.attention.cache import FLOAT8, read_rows
from octavo.attention.merge import add_sinks
from octavo.attention.reference import attend_sequence
from octavo.ops.call import Call, Keys


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Return (out [T, H, Dv], lse [T, H] float32) of a call.

    A token that sees nothing, or that does not count, gets 0 and -inf; with sinks, 0 and its sink.
    """
    scores, keys, queries = call.scores, call.keys, call.queries.ragged(call.keys.seq_lens)
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
        slopes = scores.alibi_slopes
        bias = None if slopes is None else (slopes[s] if slopes.dim() == 2 else slopes, distance.abs())
        visible = torch.ones_like(distance, dtype=torch.bool)
        if scores.left is not None:
            visible &= distance <= scores.left
        if scores.right is not None:
            visible &= distance >= -scores.right
        out[tokens], lse[tokens] = attend_sequence(
            q[tokens].to(dtype), k, v, visible, bias, scale=scores.scale, softcap=scores.softcap
        )
    return add_sinks(out, lse, scores.sinks, out_dtype)


def _gather(keys: Keys, s: int, dtype: torch.dtype) -> tuple[int, Tensor, Tensor]:
    """Return (first key's position, k [K, KH, D], v [K, KH, Dv]) of sequence s."""
    block_size = keys.k.shape[1]
    begin = 0 if keys.begin is None else int(keys.begin[s])
    at = torch.arange(begin, max(begin, int(keys.seq_lens[s])), device=keys.k.device)
    index = (keys.block_table[s, at // block_size].long(), at % block_size)
    k_scale = None if keys.k_scale is None else keys.k_scale[s]
    v_scale = None if keys.v_scale is None else keys.v_scale[s]
    return begin, read_rows(keys.k, index, dtype, k_scale), read_rows(keys.v, index, dtype, v_scale)
