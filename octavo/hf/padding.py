"""flash_attn.bert_padding: from padded rows to ragged tokens and back."""

import torch
from torch.nn.functional import pad

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(tokens: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the rows of tokens [N, ...] at indices [T] int64: [T, ...]."""
    return tokens[indices]


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """Return [first_axis_dim, ...] zeros with values [T, ...] at indices [T] int64."""
    out = values.new_zeros(first_axis_dim, *values.shape[1:])
    out[indices] = values
    return out


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Take the tokens that a mask selects out of padded rows. Waits for the device.

    Args:
        hidden_states: [B, S, ...].
        attention_mask: [B, S], true for tokens that count.
        unused_mask: [B, S], true for tokens that are kept without counting; None: none.

    Returns:
        The T tokens [T, ...]; their indices [T] int64 in the flattened rows; cumulative lengths [B + 1]
        int32; the longest length; and how many tokens of each row count [B] int32.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cumulative = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    used = attention_mask.sum(-1, dtype=torch.int32)
    return hidden_states.flatten(0, 1)[indices], indices, cumulative, int(lengths.max()), used


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Put T tokens [T, ...] back into padded rows [batch, seqlen, ...], zero elsewhere."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))
