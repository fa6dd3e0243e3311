"""flash_attn.layers.rotary: rotary embedding by tables of cosines and sines."""

import torch

from octavo.errors import InvalidArgumentError
from octavo.ops.append import rotate
from octavo.ops.call import Rotary


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Rotate the first R dims of every head by its position's angle; float32 inside.

    Args:
        x: [B, S, H, D], or [T, H, D] with cu_seqlens.
        cos: [positions, R / 2].
        sin: [positions, R / 2].
        interleaved: Pairs are (0, 1), (2, 3), ...; else (0, R / 2), (1, R / 2 + 1), ...
        inplace: Write into x.
        seqlen_offsets: Position of each sequence's first token: a number or [B] int.
        cu_seqlens: [B + 1] int32, where each sequence begins in x.
        max_seqlen: Longest sequence; not needed here.

    Returns:
        The shape and dtype of x; x itself if inplace.
    """
    if 2 * cos.shape[-1] > x.shape[-1] or cos.shape != sin.shape:
        raise InvalidArgumentError(
            f"cos {list(cos.shape)} and sin {list(sin.shape)} must be [positions, R / 2], R <= {x.shape[-1]}"
        )
    positions = _positions(x, seqlen_offsets, cu_seqlens).flatten()
    if positions.is_cpu and len(positions):
        low, high = map(int, positions.aminmax())
        if not 0 <= low <= high < len(cos):
            raise InvalidArgumentError(
                f"positions go from {low} to {high}, but cos and sin have {len(cos)} rows"
            )
    rotary = Rotary(cos, sin, interleaved, positions, queries_advance=False)
    rotated = rotate(x.flatten(0, -3), rotary, positions).view(x.shape)
    return x.copy_(rotated) if inplace else rotated


def _positions(x: torch.Tensor, offsets: int | torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Return the position of every token: [B, S] or [T] int64."""
    if cu_seqlens is None:
        steps = torch.arange(x.shape[1], device=x.device)
        return steps + (
            offsets.long()[:, None]
            if isinstance(offsets, torch.Tensor)
            else torch.full((x.shape[0], 1), offsets, device=x.device)
        )
    steps = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens.long(), steps, right=True) - 1
    first = offsets.long()[sequence] if isinstance(offsets, torch.Tensor) else offsets
    return steps - cu_seqlens.long()[sequence] + first
