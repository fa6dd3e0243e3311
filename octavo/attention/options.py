"""How attention scores are computed from queries and keys; the same for every implementation."""

from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from octavo.errors import InvalidArgumentError

# Kernels compute in float32: larger numbers become infinite, and smaller ones 0, which means "off".
_LARGEST, _SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
_LONGEST = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Options of one attention call.

    The score of the query at position p and the key at position j <= p is
    cap(scale * q.k) - slope * (p - j), with cap(s) = softcap * tanh(s / softcap).

    Attributes:
        scale: factor of q.k, usually 1 / sqrt(D).
        window: a token sees its last `window` keys, including itself; None: all.
        softcap: bound of the scores before the bias; 0: none.
        alibi_slopes: [H] float32 ALiBi slope of each query head; None: no bias.
    """

    scale: float
    window: int | None = None
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not (_is_integer(self.window) and 1 <= self.window <= _LONGEST):
            raise InvalidArgumentError(
                f"window must be at least 1 token, an int64, or None for all; got {self.window!r}"
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


def _is_integer(value: object) -> bool:
    """Return whether the value is an int but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)
