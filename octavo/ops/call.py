"""The arguments of a public function in groups, and the one form of every call: ragged queries, paged cache.

The groups Options, Lengths, Places and News name arguments as flash_attn_with_kvcache does, which describes
them; a Call holds what they mean.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.attention import DeviceForest, ForestPlan

Plan = ForestPlan | DeviceForest | None
Caches = tuple[Tensor, Tensor, Tensor]
"""(q, keys, values)."""

Attended = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]
"""What flash-attention's functions return: out, with lse, or with lse and None for the probabilities."""


class Options(NamedTuple):
    """The options that all public functions share.

    left, right: of the window, see Scores.
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


def rows_of(cu_seqlens: Tensor, token: Tensor) -> Tensor:
    """Return the sequence of each token; tokens after the last sequence count as its own."""
    row = torch.searchsorted(cu_seqlens[1:], token, right=True)
    return row.clamp_(max=max(0, cu_seqlens.shape[0] - 2))


def is_on_gpu(q: Tensor) -> bool:
    """Say whether kernels for GPUs run the call; the host must not read its lengths then."""
    return q.device.type != "cpu"


def contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor with stride 1 in its last dimension, a copy where that needs one."""
    if tensor.stride(-1) == 1:
        return tensor
    if tensor.shape[-1] == 1:
        return tensor.as_strided(tensor.shape, (*tensor.stride()[:-1], 1))
    return tensor.contiguous()


class Scores(NamedTuple):
    """How scores are made. The query at position p sees the keys p - left <= j <= p + right.

    Attributes:
        scale: factor of q.k.
        left: keys before the query's own position that it sees; None: all.
        right: keys after it that it sees; 0 is a causal mask; None: all.
        softcap: scores become softcap * tanh(score / softcap); 0: off.
        alibi_slopes: [H] or [S, H] float32; adds -slope * |p - j| after the cap.
        sinks: [H] float scores of a key without a value, which every query sees; None: none.
    """

    scale: float
    left: int | None
    right: int | None
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None


class Keys(NamedTuple):
    """A paged cache and what each of S sequences sees of it.

    Attributes:
        k: [N, B, KH, D] keys; a dense cache has one block per sequence, ragged keys are one block.
        v: [N, B, KH, Dv] values.
        block_table: [S, W] int32.
        seq_lens: [S] int32, one past each sequence's last key; 0 or less: it has none.
        begin: [S] int32, each sequence's first key; None: 0.
        k_scale: [S, KH] float32, what 1.0 in a float8 cache stands for; None: 1. Holds the scale of q too.
        v_scale: the same for values.
    """

    k: Tensor
    v: Tensor
    block_table: Tensor
    seq_lens: Tensor
    begin: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None

    @property
    def capacity(self) -> int:
        """Tokens that a row of the block table holds."""
        return self.block_table.shape[1] * self.k.shape[1]


class Queries(NamedTuple):
    """Ragged queries, T tokens of S sequences. A sequence's last query is at its last key.

    Attributes:
        q: [T, H, D].
        cu_seqlens: [S + 1] int32, cumulative query lengths; None: all have one length.
        used: [S] int32, the first tokens of each sequence that count; the others get 0; None: all.
        max_len: most tokens of a sequence, known to the host.
        length: tokens of every sequence; 0: they differ.
    """

    q: Tensor
    cu_seqlens: Tensor | None
    used: Tensor | None
    max_len: int
    length: int

    def replaced(self, q: Tensor) -> "Queries":
        """Return this batch with other values of q, such as rotated ones."""
        return self._replace(q=q)

    def ragged(self, seq_lens: Tensor) -> "RaggedQueries":
        """Return this batch with cu_seqlens and positions; seq_lens [S] int32: where each sequence ends."""
        num_sequences, device = seq_lens.shape[0], seq_lens.device
        if self.cu_seqlens is None:
            cu_seqlens = uniform_bounds(num_sequences, self.length, device)
            step = torch.arange(self.length, dtype=torch.int32, device=device)
            lens = self.length if self.used is None else self.used
            positions = ((seq_lens - lens).unsqueeze(1) + step).flatten()
            return RaggedQueries(self.q, cu_seqlens, positions, self.used, self.max_len)
        begin = self.cu_seqlens[:-1]
        lens = self.cu_seqlens[1:] - begin if self.used is None else self.used
        token = torch.arange(self.q.shape[0], dtype=torch.int32, device=device)
        row = rows_of(self.cu_seqlens, token)
        positions = (seq_lens - lens - begin)[row] + token if num_sequences else token
        return RaggedQueries(self.q, self.cu_seqlens, positions, self.used, self.max_len)


def uniform_bounds(num_sequences: int, length: int, device: torch.device) -> Tensor:
    """Return the cumulative lengths [S + 1] int32 of sequences of one length."""
    return torch.arange(num_sequences + 1, dtype=torch.int32, device=device) * length


class RaggedQueries(NamedTuple):
    """Queries with nothing left out: cu_seqlens [S + 1] and positions [T] int32; see Queries."""

    q: Tensor
    cu_seqlens: Tensor
    positions: Tensor
    used: Tensor | None
    max_len: int


class Rotary(NamedTuple):
    """Rotary embedding of the first 2 R dimensions of queries and new keys.

    Attributes:
        cos, sin: [P, R], any float dtype, by position.
        interleaved: rotate dimensions (2 i, 2 i + 1) together, else (i, R + i).
        offsets: [S] int32, position of each sequence's first new key and first query.
        queries_advance: query i is at offset + i; else all queries are at the offset.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool
    offsets: Tensor
    queries_advance: bool


class NewKeys(NamedTuple):
    """New keys and values, and where they go.

    Attributes:
        k: [Tn, KH, D].
        v: [Tn, KH, Dv].
        cu_seqlens: [S + 1] int32, cumulative numbers of new keys; None: all have one length.
        length: new keys of every sequence; 0: they differ.
        cached_lens: [S] int32, tokens in the cache before: where the first new key goes. Less than 0: the
            sequence is empty, and its new keys go nowhere.
        begin: [S] int32, each sequence's first key; None: 0. Read only by checks.
        block_table: [S, W] int32.
        k_scale, v_scale: [S, KH] float32 of a float8 cache; None: 1.
    """

    k: Tensor
    v: Tensor
    cu_seqlens: Tensor | None
    length: int
    cached_lens: Tensor
    begin: Tensor | None
    block_table: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

    def lengths_after(self) -> Tensor:
        """Return the tokens in the cache afterwards, [S] int32; 0 or less: the sequence is empty."""
        if self.cu_seqlens is None and self.length <= 1:
            return self.cached_lens + self.length
        more = self.length if self.cu_seqlens is None else self.cu_seqlens[1:] - self.cu_seqlens[:-1]
        return (self.cached_lens + more).masked_fill(self.cached_lens < 0, 0)


class Call(NamedTuple):
    """One call of attention.

    Attributes:
        num_splits: parts into which keys are split; 0: chosen, 1: not split.
        plan: what the sequences share; None: unknown.
    """

    queries: Queries
    keys: Keys
    scores: Scores
    num_splits: int
    plan: Plan
