"""Attention of one call: where it runs."""

import torch
from torch import Tensor

from octavo.ops import reference
from octavo.ops.call import Call


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Return (out [T, H, Dv] in the dtype of q, lse [T, H] float32); see octavo.ops.reference."""
    q, keys = call.queries.q, call.keys
    if keys.capacity == 0 or keys.k.shape[0] == 0 or q.shape[0] == 0:
        out = torch.zeros(*q.shape[:2], keys.v.shape[3], dtype=q.dtype, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
        return reference.add_sinks(out, lse, call.scores.sinks)
    return reference.attend(call)
