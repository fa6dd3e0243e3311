"""A mask as Octavo's kernels need it: which run of keys each row may see.

transformers describes a mask as a function of (batch, head, query, key) plus a padding mask. Kernels that
never build a mask read two numbers for each row instead:

    key      0    1    2    3    4    5    6    7
    mask     0    0    0    1    1    1    1    1     left padding, all of it before `begin`
                            ^ begin = 3               ^ end = 8

Causality and the window come with the call itself. What does not fit into this is refused by name.
"""

from collections.abc import Callable, Iterator

import torch

from octavo.errors import InvalidArgumentError

_BIDIRECTIONAL = {"bidirectional_mask_function", "sliding_window_bidirectional_overlay.<locals>.inner_mask"}
_CAUSAL = {"causal_mask_function", "sliding_window_overlay.<locals>.inner_mask"}
_WINDOW = "sliding_window_bidirectional_overlay.<locals>.inner_mask"
# Several sequences in one row. Their lengths come as cu_seq_lens_q with the call, which then needs no mask.
_PACKED = {
    "packed_sequence_mask_function.<locals>.inner_mask",
    "remap_positions_for_packed_sequence.<locals>.inner_mask",
}


def octavo_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: Callable[..., object] | None = None,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **others: object,
) -> torch.Tensor | None:
    """Return the keys each row may see, in the shape of transformers' AttentionMaskInterface.

    Args:
        batch_size: B.
        q_length: Queries of a row.
        kv_length: Keys of a row, with those of a static cache that nothing has been written to.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        mask_function: What transformers would evaluate for each query and key; read by name.
        attention_mask: [B, positions] bool, True for tokens and False for padding; None: no padding.
        device: Where the result lives.
        others: dtype, config and hints for other masks; none changes who sees whom.

    Returns:
        None if every key counts; int32 [B, 1, 1, 2], the first key of each row and the one behind its last;
        or int32 [0, 1, 1, 2] for packed sequences, whose lengths must come with the call. There are four
        dimensions because transformers would make a mask of a tensor with two.

    Raises:
        InvalidArgumentError: a pattern that is not causal, bidirectional or a sliding window, or a padding
            mask with padding between tokens.
    """
    names = {getattr(part, "__qualname__", repr(part)) for part in _parts(mask_function)}
    if names & _PACKED:
        return torch.empty(0, 1, 1, 2, dtype=torch.int32, device=device)
    if unknown := sorted(names - _CAUSAL - _BIDIRECTIONAL):
        raise InvalidArgumentError(
            f"this model asks for the attention mask {', '.join(unknown)}; octavo's attention knows causal, "
            "bidirectional and sliding-window masks: load the model with attn_implementation='sdpa'"
        )
    causal = not names & _BIDIRECTIONAL
    # One past the last key that was written: positions count from the sequence's start, keys from kv_offset.
    end = q_offset + q_length - kv_offset if causal else kv_length
    whole = not isinstance(end, torch.Tensor) and end == kv_length
    if attention_mask is None:
        return None if whole else _rows(torch.zeros(batch_size, dtype=torch.int32, device=device), end)
    visible = attention_mask[:, -kv_length:].to(torch.bool)
    begin, last, padded = _run(visible)
    if whole and not padded:
        return None
    if causal:  # keys behind the last token are after every token: causality hides them
        return _rows(begin, end)
    if _WINDOW in names and bool((last != kv_length).any()):
        raise InvalidArgumentError(
            "a bidirectional sliding window needs its padding on the left: positions count from the last key"
        )
    return _rows(begin, last)


def _parts(mask_function: Callable[..., object] | None) -> Iterator[Callable[..., object]]:
    """Return the patterns whose intersection a mask function is."""
    if mask_function is None:
        return
    if getattr(mask_function, "__qualname__", "") != "and_masks.<locals>.and_mask":
        yield mask_function
        return
    for cell in mask_function.__closure__ or ():
        for part in cell.cell_contents:
            yield from _parts(part)


def _run(visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return each row's first True in [B, S] and one past its last (int32 [B]), and whether any is False.

    It waits for the GPU once in a forward pass, as transformers' own flash-attention mask does.
    """
    hidden = (~visible).to(torch.int32)
    length = visible.shape[1]
    begin = hidden.cumprod(1).sum(1, dtype=torch.int32)
    tail = hidden.flip(1).cumprod(1).sum(1, dtype=torch.int32)
    tokens = visible.sum(1, dtype=torch.int32)
    holes = (tokens > 0) & (begin + tokens + tail != length)
    padded, broken = torch.stack([hidden.any(), holes.any()]).tolist()
    if broken:
        row = int(holes.nonzero()[0])
        raise InvalidArgumentError(
            f"row {row} of attention_mask {list(visible.shape)} has padding between tokens; octavo's "
            "attention reads one run of keys: pad on the left (tokenizer.padding_side = 'left')"
        )
    return begin, length - tail, padded


def _rows(begin: torch.Tensor, end: int | torch.Tensor) -> torch.Tensor:
    """Return begin and end as [B, 1, 1, 2] int32."""
    ends = end.expand_as(begin) if isinstance(end, torch.Tensor) else torch.full_like(begin, end)
    return torch.stack([begin, ends.to(torch.int32)], dim=1)[:, None, None]
