"""How attention scores are computed from queries and keys; the same for every implementation."""

from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from octavo.errors import InvalidArgumentError

# Kernels compute in float32: larger numbers become infinite, and smaller ones 0, which means "off".
_LARGEST, _SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
_LONGEST = torch.iinfo(torch.int64).max
_LARGEST_INT32 = torch.iinfo(torch.int32).max
# More keys than any sequence has.
_ALL_LATER = 1 << 30


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Options of one attention call.

    The score of the query at position p and the key at position j is cap(scale * q.k) - slope * |p - j|, with
    cap(s) = softcap * tanh(s / softcap).

    Attributes:
        scale: factor of q.k, usually 1 / sqrt(D).
        window: a token sees its last `window` keys, including itself; None: all.
        softcap: bound of the scores before the bias; 0: none.
        alibi_slopes: [H] float32 ALiBi slope of each query head, or [S, H] those of each sequence; None: no
            bias.
        right: a token sees this many keys after its own position too; None: all of them.
        sinks: [H] score of one more key, with the value 0, that every token sees; None: there is none.
    """

    scale: float
    window: int | None = None
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    right: int | None = 0
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not (_is_integer(self.window) and 1 <= self.window <= _LONGEST):
            raise InvalidArgumentError(
                f"window must be at least 1 token, an int64, or None for all; got {self.window!r}"
            )
        if self.right != 0 and not (
            self.right is None or (_is_integer(self.right) and 1 <= self.right <= _LONGEST)
        ):
            raise InvalidArgumentError(
                f"right must be at least 0 tokens, an int64, or None for all; got {self.right!r}"
            )
        if not (isinstance(self.scale, Real) and -_LARGEST <= self.scale <= _LARGEST):
            raise InvalidArgumentError(
                f"scale must be a finite float32 number, usually 1 / sqrt(head_dim); got {self.scale!r}"
            )
        softcap = self.softcap
        if not (isinstance(softcap, Real) and (softcap == 0 or _SMALLEST <= softcap <= _LARGEST)):
            raise InvalidArgumentError(
                f"softcap must be 0 (off) or a positive, finite float32 number; got {softcap!r}"
            )

    @property
    def shift(self) -> int:
        """Added to positions by kernels, so that a token sees no key after its shifted position."""
        return _ALL_LATER if self.right is None else min(self.right, _ALL_LATER)

    @property
    def shifted_window(self) -> int | None:
        """The window with which shifted positions see the same keys; None: no window."""
        if self.window is None or self.right == 0:
            return self.window
        return min(self.window + self.shift, _LARGEST_INT32)


def shift_positions(positions: Tensor, shift: int) -> Tensor:
    """Return positions [T] int32 plus ScoreOptions.shift, within what kernels can count up from."""
    if shift == 0:
        return positions
    return (positions.long() + shift).clamp_(max=_LARGEST_INT32 - 1).int()


def _is_integer(value: object) -> bool:
    """Return whether the value is an int but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)
