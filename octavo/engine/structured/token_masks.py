"""Which tokens may come next: masks of a batch, filled on the host and applied to logits on the device."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from octavo.engine.request import Request
from octavo.kernels.copies import to_device

if TYPE_CHECKING:
    from llguidance import LLExecutor


class TokenMasks:
    """Fills masks on all cores, and forbids tokens by them.

    On a GPU nothing waits: while the device runs the network, the host fills the masks.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Keep shapes.

        Args:
            vocab_size: V, width of the logits.
            device: where they are.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._executor: LLExecutor | None = None

    def forbid_(self, logits: Tensor, requests: Sequence[Request], ends: Sequence[int]) -> None:
        """Set the logits of tokens that may not come next to -inf, in rows of requests with a grammar.

        Args:
            logits: [R, V] float32, one row per request, changed in place.
            requests: R requests, whose tokens the host knows if they have a grammar.
            ends: positions of the tokens to be sampled.
        """
        rows = [row for row, request in enumerate(requests) if request.is_structured]
        if rows:
            outputs = [ends[row] - requests[row].num_prompt_tokens for row in rows]
            self.apply_(logits, rows, self.fill([requests[row] for row in rows], outputs))

    def fill(self, requests: Sequence[Request], num_output_tokens: Sequence[int]) -> np.ndarray:
        """Find what may come next in each request.

        The row of a matcher in error allows EOS alone; its next `accept` says what is wrong.

        Args:
            requests: R requests with a grammar.
            num_output_tokens: how many tokens each has generated.

        Returns:
            [R, ceil(V / 32)] int32, bit i % 32 of word i // 32: token i may come next.
        """
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor()
        masks = np.zeros((len(requests), -(-self._vocab_size // 32)), dtype=np.int32)
        matchers = [(r.matcher.raw, row) for row, r in enumerate(requests) if r.matcher is not None]
        fill_next_token_bitmask_par(self._executor, matchers, masks)
        for mask, request, num in zip(masks, requests, num_output_tokens, strict=True):
            _forbid_end(mask, request, is_early=num < request.params.min_tokens)
        return masks

    def apply_(self, logits: Tensor, rows: Sequence[int], masks: np.ndarray) -> None:
        """Set forbidden logits to -inf.

        Args:
            logits: [R, V] float32, changed in place.
            rows: which A of them, in rising order.
            masks: [A, ceil(V / 32)] int32, as `fill` returns them.
        """
        sent = to_device(masks.view(np.uint8), self._device)
        spread = spread_on_device if self._device.type == "cuda" else spread_on_host
        forbidden = spread(sent)[:, : logits.shape[1]]
        if len(rows) == len(logits):
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            at = to_device(np.array(rows), self._device)
            logits.index_copy_(0, at, logits[at].masked_fill_(forbidden, -torch.inf))


def spread_on_device(masks: Tensor) -> Tensor:
    """Return [A, 8 B] bool, True for each bit that is 0 in [A, B] uint8 masks."""
    # Shifts of a row of numbers, so that no constant has to be kept or sent.
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    return ((masks[:, :, None] >> shifts) & 1 == 0).flatten(1)


def spread_on_host(masks: Tensor) -> Tensor:
    """Do what `spread_on_device` does, on a CPU some fifty times faster."""
    return torch.from_numpy(np.unpackbits(~masks.numpy(), axis=1, bitorder="little").view(np.bool_))


def _forbid_end(mask: np.ndarray, request: Request, *, is_early: bool) -> None:
    """Clear the bits of tokens that may not end the output yet, unless the grammar takes no others."""
    assert request.matcher is not None
    forbidden: frozenset[int] = frozenset()
    if is_early or request.params.ignore_eos:
        forbidden |= request.matcher.grammar.eos_token_ids
    if is_early:
        forbidden |= request.stop_token_ids
    if not forbidden:
        return
    allowed = mask.copy()
    eights = allowed.view(np.uint8)
    for token_id in forbidden:
        eights[token_id // 8] &= 0xFF ^ 1 << token_id % 8
    if allowed.any():
        mask[:] = allowed
