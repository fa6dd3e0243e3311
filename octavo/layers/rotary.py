"""Rotary positions as one complex multiplication.

Checkpoints rotate dimension i of a head with dimension i + D/2. Loading reorders the output rows of the
query and key projections so that the two become neighbours, a complex number each:

    checkpoint   a0 a1 a2 b0 b1 b2      here   a0 b0 a1 b1 a2 b2      pair i = a_i + i b_i

Queries and keys are reordered alike, so every score stays what it was, and rotating all heads of q and k
is a single in-place product instead of seven operators.
"""

import torch
from torch import Tensor


class Rotary:
    """Turns positions into rotations. Computes angles in every step: no table, no longest position."""

    def __init__(self, inverse_frequencies: Tensor, attention_factor: float) -> None:
        """Keep the frequencies.

        Args:
            inverse_frequencies: [D / 2] float32, radians per position.
            attention_factor: factor of rotated queries and keys; 1 for most models.
        """
        self.inverse_frequencies = inverse_frequencies
        self.attention_factor = attention_factor
        self._length = torch.tensor(attention_factor, device=inverse_frequencies.device)

    def __call__(self, positions: Tensor) -> Tensor:
        """Return the [T, 1, D / 2] complex64 rotations of [T] integer positions."""
        angles = positions[:, None, None] * self.inverse_frequencies
        return torch.polar(self._length.expand_as(angles), angles)


def rotate_(heads: Tensor, rotations: Tensor) -> None:
    """Rotate every head in place.

    Args:
        heads: [T, H, D] queries and keys with interleaved halves; may be a view of a fused qkv whose last
            dimension is contiguous; mutated.
        rotations: [T, 1, D / 2] complex64 from Rotary.
    """
    pairs = heads.unflatten(-1, (-1, 2))
    if heads.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotations)
    else:
        # There are no half-precision complex products.
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(rotations)))


def interleave_halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Reorder dimension 0 of a query or key weight, bias or norm from the checkpoint's order.

    Args:
        tensor: [heads * D, ...].
        head_dim: D.

    Returns:
        A new tensor of the same shape.
    """
    halves = tensor.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).reshape(tensor.shape)
