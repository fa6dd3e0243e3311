"""A projection of all experts of a layer in MXFP4, packed for a GPU's kernels."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.errors import UnsupportedModelError
from octavo.forms.base import StackShape, Storage
from octavo.forms.mxfp4 import BLOCK, Mxfp4Weight

LARGEST_EXPONENT = 128
"""Largest exponent of experts on a GPU, 127 too large: kernels read scales 2 ** 126 times as large."""
# Columns of a span: a word holds eight of them, and four exponents are a word.
_SPAN = 4 * BLOCK
# Exponents are stored so much larger.
_OFFSET = LARGEST_EXPONENT - 2
# For each block of a span, the bits of a word that hold s, e, e and m of the first of its two numbers. Those
# of the second are 16 bits further, around the end of the word.
_PLACES = ((15, 8, 7, 6), (21, 14, 13, 12), (11, 4, 3, 2), (17, 10, 9, 0))


@dataclass(frozen=True, slots=True)
class Mxfp4ExpertWeight:
    """Weights [E, N, K] in MXFP4; K is a multiple of 32. See forms.mxfp4.

    Attributes:
        size: K.
        words: [E, spans, N, 16] int32, contiguous: numbers, see pack_words.
        exponents: [E, spans, N] int32, contiguous, see pack_exponents.
        bias: [E, N] contiguous, or None.
    """

    size: int
    words: Tensor
    exponents: Tensor
    bias: Tensor | None = None

    @property
    def kind(self) -> str:
        """See ExpertsWeight."""
        return "mxfp4"

    @property
    def device(self) -> torch.device:
        """See ExpertsWeight."""
        return self.words.device

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        return self.words.shape[0], self.words.shape[2], self.size

    @property
    def form(self) -> Hashable:
        """See ExpertWeight."""
        return "mxfp4", self.bias is not None

    def dequantise(self) -> Tensor:
        """Return the weights [E, N, K] float32."""
        number, num_rows, _ = self.shape
        codes = torch.stack([_code(self.words, block) for block in range(4)], 3).flatten(3)
        codes = codes.transpose(1, 2).reshape(number * num_rows, -1)[:, : self.size]
        exponents = torch.stack([self.exponents >> 8 * block & 255 for block in range(4)], 3) - _OFFSET
        exponents = exponents.transpose(1, 2).reshape(number * num_rows, -1)[:, : self.size // BLOCK]
        values = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        return Mxfp4Weight(values, exponents.to(torch.uint8)).dequantise().view(number, num_rows, self.size)


def _code(words: Tensor, block: int) -> Tensor:
    """Return the numbers of a block as four bits each: [..., 16] to [..., 32]."""
    codes = torch.zeros_like(words).unsqueeze(-1).repeat_interleave(2, -1)
    for bit, place in zip((3, 2, 1, 0), _PLACES[block], strict=True):
        for half in range(2):
            codes[..., half] |= (words >> (place + 16 * half) % 32 & 1) << bit
    return codes.flatten(-2)


def num_spans(size: int) -> int:
    """Return how many spans K columns take; zeros fill up the last one."""
    return -(-size // _SPAN)


def pack_words(values: Tensor) -> Tensor:
    """Return bytes [N, K / 2] of an Mxfp4Weight as words [spans, N, 16] int32.

    A span is four blocks of 32 columns; zeros fill up the last one. Word j has the numbers 2 j and 2 j + 1 of
    each block. In bfloat16 a number's bits are s 000000ee m000000, and for three of the blocks a word, turned
    as a whole, has them at those distances:

        bit         15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
        of block     0  1  1  1  2  3  3  0  0  0  1  2  2  2  3  3
                     s  e  e  m  s  e  e  e  e  m  s  e  e  m  s  m

    The upper half is alike, with the second numbers; but signs of blocks 1 and 3 are in the other half.
    """
    codes = torch.stack((values & 15, values >> 4), 2).int().flatten(1)
    codes = pad(codes, (0, -codes.shape[1] % _SPAN)).view(len(codes), -1, 4, _SPAN // 8, 2)
    words = torch.zeros_like(codes[:, :, 0, :, 0])
    for block, places in enumerate(_PLACES):
        for bit, place in zip((3, 2, 1, 0), places, strict=True):
            for half in range(2):
                words |= (codes[:, :, block, :, half] >> bit & 1) << (place + 16 * half) % 32
    return words.transpose(0, 1)


def pack_exponents(exponents: Tensor) -> Tensor:
    """Return exponents [N, K / 32] of an Mxfp4Weight, at most LARGEST_EXPONENT, as words [spans, N] int32.

    A byte for each block of a span, the first one in the lowest bits: 126 more than the exponent.
    """
    moved = pad(exponents.int() + _OFFSET, (0, -exponents.shape[1] % 4)).unflatten(1, (-1, 4))
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=moved.device)
    return (moved << shifts).sum(2, dtype=torch.int32).T


class Mxfp4Stack:
    """An ExpertStack of numbers of MXFP4."""

    def __init__(self, shape: StackShape) -> None:
        """Take memory."""
        self._stacked = self.blank(shape)
        self._largest = 0
        self._first_name = ""

    @classmethod
    def blank(cls, shape: StackShape, storage: Storage | None = None) -> Mxfp4ExpertWeight:
        """Return weights whose numbers are not set: what decides by which products they are multiplied."""
        sizes = shape.number, num_spans(shape.columns), shape.rows
        words = torch.empty(*sizes, 16, dtype=torch.int32, device=shape.device)
        return Mxfp4ExpertWeight(shape.columns, words, words.new_empty(sizes))

    def put(self, name: str, expert: int, first: int, weight: Mxfp4Weight) -> None:
        """See ExpertStack."""
        assert isinstance(weight, Mxfp4Weight), f"{name}: {weight.kind} experts beside others of MXFP4"
        self._first_name = self._first_name or name
        place = slice(first, first + weight.shape[0])
        self._stacked.words[expert, :, place] = pack_words(weight.values)
        self._stacked.exponents[expert, :, place] = pack_exponents(weight.exponents)
        self._largest = max(self._largest, int(weight.exponents.max()))

    def finish(self, bias: Tensor | None) -> Mxfp4ExpertWeight:
        """See ExpertStack.

        Raises:
            UnsupportedModelError: a scale is larger than kernels support.
        """
        if self._largest > LARGEST_EXPONENT:
            raise UnsupportedModelError(
                f"{self._first_name} and other experts have scales above 2, which the GPU's kernels do not "
                'support; use quantization="none"'
            )
        return replace(self._stacked, bias=bias)
