"""From flash-attention's arguments to the one internal form, octavo.ops.call. Nothing waits for a GPU."""

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from octavo.attention import DeviceForest, ForestPlan
from octavo.attention.float8 import FLOAT8
from octavo.errors import InvalidArgumentError
from octavo.ops.call import Call, Keys, Queries, Scores, rows_of
from octavo.ops.checks import check_queries, check_shape, floats, integers

Window = Sequence[int] | Tensor | None


def read_window(window_size: Window, *, causal: bool) -> tuple[int | None, int | None]:
    """Return (left, right) of a window: a pair, a list or a CPU tensor of two; None and -1 mean all."""
    if isinstance(window_size, Tensor):
        if window_size.device.type != "cpu":
            raise InvalidArgumentError(
                f"window_size must be numbers or a CPU tensor: on {window_size.device} it would have to be "
                f"waited for"
            )
        window_size = window_size.tolist()
    pair = (-1, -1) if window_size is None else tuple(window_size)
    if len(pair) != 2:
        raise InvalidArgumentError(f"window_size must be (left, right), -1 for all; got {window_size!r}")
    left, right = (None if side is None or side < 0 else int(side) for side in pair)
    return left, 0 if causal else right


def read_scores(
    q: Tensor,
    num_sequences: int,
    window: tuple[int | None, int | None],
    *,
    softmax_scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    s_aux: Tensor | None,
) -> Scores:
    """Check and return the options of the scores of q [..., H, D]."""
    num_heads, head_dim = q.shape[-2:]
    if softmax_scale is not None and not isinstance(softmax_scale, Real):
        raise InvalidArgumentError(f"softmax_scale must be a number; got {softmax_scale!r}")
    if not isinstance(softcap, Real) or softcap < 0:
        raise InvalidArgumentError(f"softcap must be 0 (off) or positive; got {softcap!r}")
    if alibi_slopes is not None:
        shape = [num_sequences, num_heads] if alibi_slopes.dim() == 2 else [num_heads]
        alibi_slopes = floats("alibi_slopes", alibi_slopes, q, "[H] or [B, H]", shape)
    if s_aux is not None:
        s_aux = floats("s_aux", s_aux, q, "[H]", [num_heads])
    scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    return Scores(scale, *window, float(softcap), alibi_slopes, s_aux)


def read_scales(
    q: Tensor,
    k: Tensor,
    num_sequences: int,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the scales [S, KH] float32 of (keys and queries together, keys, values), or None each."""
    named = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    given = [name for name, scale in named.items() if scale is not None]
    if not given:
        return None, None, None
    if k.dtype != FLOAT8:
        raise InvalidArgumentError(f"{given[0]} is for float8_e4m3fn keys and values, these are {k.dtype}")
    shape = [num_sequences, k.shape[-2]]
    q_scale, k_scale, v_scale = (
        None if scale is None else floats(name, scale, q, "[B, KH]", shape).contiguous()
        for name, scale in named.items()
    )
    # Kernels take both scales or neither.
    k_scale = torch.ones(shape, device=q.device) if k_scale is None else k_scale
    v_scale = torch.ones(shape, device=q.device) if v_scale is None else v_scale
    return k_scale if q_scale is None else k_scale * q_scale, k_scale, v_scale


def read_queries(
    q: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    seqused_q: Tensor | None = None,
) -> Queries:
    """Return q, dense [S, Sq, H, D] or ragged [T, H, D], as ragged queries that end where seq_lens do."""
    num_sequences = seq_lens.shape[0]
    if seqused_q is not None:
        seqused_q = integers("seqused_q", seqused_q, q, "[B]", [num_sequences])
    if cu_seqlens_q is None:
        length = q.shape[1]
        return Queries(q.flatten(0, 1), None, None, seqused_q, length, length)
    lens = cu_seqlens_q[1:] - cu_seqlens_q[:-1] if seqused_q is None else seqused_q
    token = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    row = rows_of(cu_seqlens_q, token)
    positions = (seq_lens - lens - cu_seqlens_q[:-1])[row] + token if num_sequences else token
    max_len = q.shape[0] if max_seqlen_q is None else max_seqlen_q
    return Queries(q, cu_seqlens_q, positions, seqused_q, max_len, 0)


def count_sequences(q: Tensor, cu_seqlens_q: Tensor | None) -> tuple[int, Tensor | None]:
    """Check q and its lengths; return the number of sequences and cu_seqlens_q as int32."""
    if cu_seqlens_q is None:
        check_queries(q, "[B, Sq, H, D]")
        return q.shape[0], None
    check_queries(q, "[T, H, D]")
    cu_seqlens_q = integers("cu_seqlens_q", cu_seqlens_q, q, "[B + 1]", [None])
    if cu_seqlens_q.shape[0] == 0:
        raise InvalidArgumentError("cu_seqlens_q must be [B + 1] and begin at 0; got [0]")
    return cu_seqlens_q.shape[0] - 1, cu_seqlens_q


def read_table(
    q: Tensor,
    name: str,
    k: Tensor,
    num_sequences: int,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
) -> Tensor:
    """Return the block table [S, W] of a cache k [N, B, KH, D], paged or, without block_table, dense."""
    if cache_batch_idx is not None:
        cache_batch_idx = integers("cache_batch_idx", cache_batch_idx, q, "[B]", [num_sequences])
    if block_table is not None:
        num_rows = num_sequences if cache_batch_idx is None else None
        block_table = integers("block_table", block_table, q, "[B, max_blocks]", [num_rows, None])
        if cache_batch_idx is None:
            return block_table
        return block_table.index_select(0, cache_batch_idx)
    if cache_batch_idx is not None:
        return cache_batch_idx.unsqueeze(1)
    check_shape(name, k, "[B, S, KH, D]", [num_sequences, None, None, None])
    return torch.arange(num_sequences, dtype=torch.int32, device=q.device).unsqueeze(1)


def read_lengths(name: str, lengths: Tensor | int | None, default: int, q: Tensor, num: int) -> Tensor:
    """Return lengths [S] int32: given as a tensor or one int for all, else the default."""
    if isinstance(lengths, Tensor):
        return integers(name, lengths, q, "[B]", [num])
    value = default if lengths is None else lengths
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise InvalidArgumentError(f"{name} must be an int or [B] int32; got {lengths!r}")
    return torch.full((num,), value, dtype=torch.int32, device=q.device)


def read_splits(num_splits: int) -> int:
    """Check and return num_splits."""
    if isinstance(num_splits, bool) or not isinstance(num_splits, int) or num_splits < 0:
        raise InvalidArgumentError(f"num_splits must be 0 (automatic) or positive; got {num_splits!r}")
    return num_splits


def ragged_keys(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_k: Tensor, seqused_k: Tensor | None, num_sequences: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return unpaged k, v [Tk, KH, D] as one block: (k, v, block table, seq_lens, begin)."""
    check_shape("k", k, "[Tk, KH, D]", [None, None, q.shape[-1]])
    cu_seqlens_k = integers("cu_seqlens_k", cu_seqlens_k, q, "[B + 1]", [num_sequences + 1])
    begin, end = cu_seqlens_k[:-1], cu_seqlens_k[1:]
    if seqused_k is not None:
        end = begin + seqused_k
    table = torch.zeros(num_sequences, 1, dtype=torch.int32, device=q.device)
    return k.unsqueeze(0), v.unsqueeze(0), table, end, begin


def make_call(
    queries: Queries,
    keys: Keys,
    scores: Scores,
    num_splits: int,
    plan: ForestPlan | DeviceForest | None,
) -> Call:
    """Put a call together."""
    if plan is not None and not isinstance(plan, ForestPlan | DeviceForest):
        raise InvalidArgumentError(f"plan must be a ForestPlan or a DeviceForest; got {type(plan).__name__}")
    return Call(queries, keys, scores, read_splits(num_splits), plan)
