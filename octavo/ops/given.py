"""The public functions' arguments in groups; see flash_attn_with_kvcache for each of them."""

from typing import NamedTuple

from torch import Tensor

from octavo.attention import DeviceForest, ForestPlan

Plan = ForestPlan | DeviceForest | None
Caches = tuple[Tensor, Tensor, Tensor]
"""(q, keys, values)."""

Attended = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]
"""What flash-attention's functions return: out, with lse, or with lse and None for the probabilities."""


class Options(NamedTuple):
    """The options that all public functions share.

    left, right: of the window, see octavo.ops.call.Scores.
    """

    softmax_scale: float | None
    left: int | None
    right: int | None
    softcap: float
    alibi_slopes: Tensor | None
    s_aux: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    num_splits: int


class Lengths(NamedTuple):
    """The lengths of queries and keys; see flash_attn_varlen_func."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None


class Places(NamedTuple):
    """Where a cache holds each sequence."""

    cache_seqlens: Tensor | int | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    block_table: Tensor | None = None


class News(NamedTuple):
    """New keys and their rotary embedding."""

    k: Tensor | None = None
    v: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = True
    rotary_seqlens: Tensor | None = None
