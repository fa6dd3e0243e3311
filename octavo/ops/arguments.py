"""Translates checked arguments of flash-attention into the internal form, without waiting for a GPU."""

import functools
import operator
from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from octavo.attention import DeviceForest, ForestPlan
from octavo.errors import InvalidArgumentError
from octavo.ops.call import Options, Plan, Scores
from octavo.ops.checks import debug

Window = Sequence[int] | Tensor | None
_LARGEST = torch.iinfo(torch.int32).max


def read_window(window_size: Window, *, causal: bool) -> tuple[int | None, int | None]:
    """Return (left, right) of a window: a pair, a list or a CPU tensor of two; None and -1 mean all."""
    if isinstance(causal, Tensor | str):
        raise InvalidArgumentError(f"causal must be True or False; got {causal!r}")
    if isinstance(window_size, Tensor):
        if window_size.device.type != "cpu":
            raise InvalidArgumentError(
                f"window_size must be numbers or a CPU tensor: on {window_size.device} it would have to be "
                f"waited for"
            )
        window_size = window_size.tolist()
    try:
        left, right = (-1, -1) if window_size is None else window_size
        left, right = _read_bound(left), _read_bound(right)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"window_size must be (left, right), whole numbers with -1 for all; got {window_size!r}"
        ) from None
    return left, 0 if causal else right


def _read_bound(bound: int | None) -> int | None:
    if bound is None:
        return None
    bound = operator.index(bound)
    return bound if 0 <= bound <= _LARGEST else None


def check_plan(plan: Plan) -> None:
    """Check the type of a plan."""
    if plan is not None and not isinstance(plan, ForestPlan | DeviceForest):
        raise InvalidArgumentError(f"plan must be a ForestPlan or a DeviceForest; got {type(plan).__name__}")


def check_maximum(name: str, value: int | None) -> None:
    """Check a maximum of lengths."""
    if value is not None and (not isinstance(value, int | Integral | torch.SymInt) or value < 0):
        raise InvalidArgumentError(f"{name} must be a number of tokens on the host; got {value!r}")


def make_scores(q: Tensor, options: Options) -> Scores:
    """Return the options of the scores of q [..., H, D]."""
    scale, slopes = options.softmax_scale, options.alibi_slopes
    return Scores(
        q.shape[-1] ** -0.5 if scale is None else float(scale),
        options.left,
        options.right,
        float(options.softcap),
        None if slopes is None else slopes.float(),
        options.s_aux,
    )


def make_scales(
    k: Tensor, num_sequences: int, options: Options
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the scales [S, KH] float32 of (keys and queries together, keys, values), or None each."""
    scales = (options.q_descale, options.k_descale, options.v_descale)
    if all(x is None for x in scales):
        return None, None, None
    ones = torch.ones(num_sequences, k.shape[-2], dtype=torch.float32, device=k.device)
    # Kernels take both scales or neither.
    q_scale, k_scale, v_scale = (ones if x is None else x.float().contiguous() for x in scales)
    return k_scale if q_scale is ones else k_scale * q_scale, k_scale, v_scale


def make_table(
    q: Tensor, num_sequences: int, block_table: Tensor | None, cache_batch_idx: Tensor | None
) -> Tensor:
    """Return the block table [S, W] of a cache, paged or, without block_table, dense."""
    if block_table is not None:
        block_table = int32(block_table)
        if cache_batch_idx is None:
            return block_table
        row = int32(cache_batch_idx)
        if debug.may_read(row):
            debug.check_rows(row, block_table.shape[0])
        return block_table.index_select(0, row)
    if cache_batch_idx is not None:
        return int32(cache_batch_idx).unsqueeze(1)
    return (_keep_blocks if _may_keep(q) else _one_block_each)(num_sequences, q.device)


def make_lengths(name: str, lengths: Tensor | int | None, default: int, q: Tensor, num: int) -> Tensor:
    """Return lengths [S] int32: of a tensor, of one int for all sequences, or the default."""
    if isinstance(lengths, Tensor):
        return int32(lengths)
    value = default if lengths is None else lengths
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or abs(value) > _LARGEST:
        raise InvalidArgumentError(f"{name} must be an int or [B] int32; got {lengths!r}")
    return (_keep_full if _may_keep(q) else _full)(num, value, q.device)


def int32(tensor: Tensor) -> Tensor:
    """Return integers as int32 with stride 1 in the last dimension.

    Raises:
        InvalidArgumentError: (on a CPU, or on a GPU with OCTAVO_DEBUG=1) one is too large for int32.
    """
    if tensor.dtype == torch.int32 and tensor.stride(-1) == 1:
        return tensor
    converted = tensor.to(torch.int32).contiguous()
    if debug.may_read(tensor) and not torch.equal(converted.long(), tensor.long()):
        raise InvalidArgumentError(f"lengths and block ids must be less than 2**31; got {tensor.tolist()}")
    return converted


def _one_block_each(num_sequences: int, device: torch.device) -> Tensor:
    return torch.arange(num_sequences, dtype=torch.int32, device=device).unsqueeze(1)


def _full(num: int, value: int, device: torch.device) -> Tensor:
    return torch.full((num,), value, dtype=torch.int32, device=device)


_keep_blocks, _keep_full = (functools.lru_cache(maxsize=64)(make) for make in (_one_block_each, _full))


def _may_keep(q: Tensor) -> bool:
    """Say whether a tensor made for a call may be kept for the next one: on a CPU, of plain numbers.

    On a GPU it could belong to a graph's memory, or be read before another stream has made it.
    """
    return q.__class__ is Tensor and q.device.type == "cpu" and not torch.compiler.is_compiling()
