"""Rotary positions as one complex multiplication.

Checkpoints rotate dimension i of a head with dimension i + D/2. Loading reorders the output rows of the
query and key projections so that the two become neighbours, a complex number each:

    checkpoint   a0 a1 a2 b0 b1 b2      here   a0 b0 a1 b1 a2 b2      pair i = a_i + i b_i

Queries and keys are reordered alike, so every score stays what it was, and rotating all heads of q and k
is a single in-place product instead of seven operators. Where only the first dimensions of a head turn, these
are reordered, and the pairs of the others are multiplied by 1.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


class Rotary:
    """Turns positions into rotations. Computes angles in every step: no table, no longest position."""

    def __init__(
        self,
        inverse_frequencies: Tensor,
        attention_factor: float,
        head_dim: int | None = None,
        growth: tuple[float, int] | None = None,
    ) -> None:
        """Keep a frequency and a length for each pair of a head; of pairs that do not turn, 0 and 1.

        Args:
            inverse_frequencies: [n] float32, radians per position, of the first 2 n dimensions.
            attention_factor: factor of rotated queries and keys; 1 for most models.
            head_dim: D; None: 2 n.
            growth: RopeConfig's query_growth and original_max_positions, if queries grow.
        """
        self.growth = growth
        num_turning = inverse_frequencies.shape[0]
        rest = 0 if head_dim is None else head_dim // 2 - num_turning
        self.inverse_frequencies = pad(inverse_frequencies, (0, rest))
        self.lengths = torch.ones_like(self.inverse_frequencies)
        self.lengths[:num_turning] = attention_factor

    def __call__(self, positions: Tensor) -> Tensor:
        """Return the [T, 1, D / 2] complex64 rotations of [T] integer positions.

        If queries grow, return [2, T, 1, D / 2]: the rotations of keys, and those of queries.
        """
        angles = positions[:, None, None] * self.inverse_frequencies
        rotations = torch.polar(self.lengths.expand_as(angles), angles)
        if self.growth is None:
            return rotations
        growth, period = self.growth
        factors = 1 + growth * torch.log(1 + (positions // period).float())
        return torch.stack((rotations, rotations * factors[:, None, None]))


def rotated_heads(rotations: Tensor, num_heads: int, num_kv_heads: int) -> list[tuple[int, int, Tensor]]:
    """Return the first head, the number and the rotations of queries and of keys, or of all together."""
    if rotations.ndim == 3:
        return [(0, num_heads + num_kv_heads, rotations)]
    return [(0, num_heads, rotations[1]), (num_heads, num_kv_heads, rotations[0])]


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


def interleave_halves(tensor: Tensor, head_dim: int, rotary_dim: int | None = None) -> Tensor:
    """Reorder dimension 0 of a query or key weight, bias or norm from the checkpoint's order.

    Args:
        tensor: [heads * D, ...].
        head_dim: D.
        rotary_dim: first dimensions of a head, which turn; None: all.

    Returns:
        A new tensor of the same shape.
    """
    turning, rest = tensor.unflatten(0, (-1, head_dim)).tensor_split([rotary_dim or head_dim], 1)
    halves = turning.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat((halves, rest), 1).reshape(tensor.shape)
