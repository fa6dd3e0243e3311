"""Masks of grammars where several ranks sample: rank 0 fills them, the others get them.

A grammar may be costly, and whether it can go on depends on limits that others share. So one rank follows it.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from octavo.engine.ranks.records import Masks
from octavo.engine.request import Request
from octavo.engine.structured.token_masks import TokenMasks


class SentMasks(TokenMasks):
    """TokenMasks of rank 0, which tells the others."""

    def __init__(self, vocab_size: int, device: torch.device, tell: Callable[[Masks], None]) -> None:
        """Keep shapes.

        Args:
            vocab_size: V, width of the logits.
            device: where they are.
            tell: sends a record to the other ranks.
        """
        super().__init__(vocab_size, device)
        self._tell = tell

    def fill(self, requests: Sequence[Request], num_output_tokens: Sequence[int]) -> np.ndarray:
        """See TokenMasks."""
        masks = super().fill(requests, num_output_tokens)
        self._tell(Masks(len(masks), masks.tobytes()))
        return masks


class ReceivedMasks(TokenMasks):
    """TokenMasks of another rank, whose requests have no matchers."""

    def __init__(self, vocab_size: int, device: torch.device, receive: Callable[[], Masks]) -> None:
        """Keep shapes.

        Args:
            vocab_size: V, width of the logits.
            device: where they are.
            receive: waits for the next record, which must be Masks.
        """
        super().__init__(vocab_size, device)
        self._receive = receive

    def fill(self, requests: Sequence[Request], num_output_tokens: Sequence[int]) -> np.ndarray:
        """See TokenMasks."""
        record = self._receive()
        return np.frombuffer(record.words, dtype=np.int32).reshape(record.num_rows, -1).copy()
