"""The attention function that transformers calls: its arguments, our operators."""

from typing import Any, cast

import torch
from torch import Tensor

from octavo.errors import InvalidArgumentError
from octavo.ops import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

# Arguments that transformers passes through every layer and that do not concern attention.
_NOT_OURS = frozenset(
    {
        "cache_position",
        "deterministic",
        "layer_idx",
        "logits_indices",
        "logits_processor_args",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "seq_idx",
        "use_cache",
    }
)


def octavo_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    sliding_window: int | None = None, softcap: float | None = None, is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None, cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None, max_length_q: int | None = None,
    max_length_k: int | None = None, output_attentions: bool | None = None, **others: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attend, in the shape of transformers' AttentionInterface. Forward only.

    Args:
        module: The layer; its `is_causal` counts where the argument is None.
        query: [B, H, Sq, D].
        key: [B, KH, Sk, D], the cache's keys with the new ones behind them.
        value: [B, KH, Sk, Dv].
        attention_mask: What octavo.hf.attention_masks.octavo_mask returned.
        scaling: Factor of q.k; None: D ** -0.5.
        dropout: Must be 0.
        sliding_window: Keys a query sees with its own, and as many after it unless causal; None: all.
        softcap: Scores become softcap * tanh(score / softcap); None: off.
        is_causal: Whether queries see no later keys.
        s_aux: [H] scores of a key without a value, which every query sees (attention sinks).
        cu_seq_lens_q: [S + 1] int32, where each of S sequences begins in a row that holds them all (B = 1).
        cu_seq_lens_k: [S + 1] int32, the same for keys.
        max_length_q: Most queries of a sequence.
        max_length_k: Most keys of a sequence.
        output_attentions: Must not be set: probabilities are never stored.
        others: Arguments of the model that do not concern attention. Those that do are refused by name.

    Returns:
        [B, Sq, H, Dv] and None.
    """
    _refuse(dropout, output_attentions, others)
    causal = bool(module.is_causal if is_causal is None else is_causal)
    window = (-1, -1)
    if sliding_window is not None:
        window = (sliding_window - 1, 0 if causal else sliding_window - 1)
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "causal": causal,
        "window_size": window,
        "softcap": softcap or 0.0,
        "s_aux": s_aux,
    }
    # Views: the kernels read any stride of tokens and heads.
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if cu_seq_lens_q is not None:
        lengths = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
        return _attend_ragged(q, k, v, lengths, options), None
    if attention_mask is None:
        return cast(Tensor, flash_attn_func(q, k, v, **options)), None
    begin, end = _read_rows(attention_mask, q.shape[0])
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=end, cache_leftpad=begin, **options)
    return cast(Tensor, out), None


def _refuse(dropout: float, output_attentions: bool | None, others: dict[str, object]) -> None:
    """Refuse what the operators would not honour."""
    if dropout:
        raise InvalidArgumentError(
            f"octavo's attention is for inference: got dropout={dropout}; call model.eval()"
        )
    if output_attentions:
        raise InvalidArgumentError(
            "octavo's attention stores no probabilities: output_attentions must be False"
        )
    for name, value in others.items():
        if value is not None and name not in _NOT_OURS:
            raise InvalidArgumentError(
                f"octavo's attention does not know the argument {name!r} of this model; "
                "load it with attn_implementation='sdpa'"
            )


def _attend_ragged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple, options: dict[str, Any]
) -> torch.Tensor:
    """Attend over several sequences in one row: q [1, T, H, D], k and v [1, Tk, KH, D]."""
    if any(length is None for length in lengths) or q.shape[0] != 1:
        raise InvalidArgumentError(
            f"packed sequences need one row and cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k; "
            f"got {q.shape[0]} rows and {['missing' if length is None else 'given' for length in lengths]}"
        )
    starts_q, starts_k, max_q, max_k = lengths
    out = flash_attn_varlen_func(
        q[0],
        k[0],
        v[0],
        starts_q.to(torch.int32),
        starts_k.to(torch.int32),
        int(max_q),
        int(max_k),
        **options,
    )
    return cast(Tensor, out)[None]


def _read_rows(mask: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first key of each row, and one past its last key, both [B] int32."""
    if mask.shape == (0, 1, 1, 2) and mask.dtype == torch.int32:
        raise InvalidArgumentError(
            "several sequences are packed in one row: pass cu_seq_lens_q, cu_seq_lens_k, max_length_q and "
            "max_length_k with the call"
        )
    if mask.shape != (num_rows, 1, 1, 2) or mask.dtype != torch.int32:
        raise InvalidArgumentError(
            f"attention_mask {list(mask.shape)} of {mask.dtype} is not of octavo's own making; pass a "
            "padding mask [batch, tokens] to the model, or load it with attn_implementation='sdpa'"
        )
    begin, end = mask[:, 0, 0].unbind(1)
    return begin.contiguous(), end.contiguous()
