"""From logits to tokens: bias, penalties and masks on any device, and a draw where no kernel samples.

A request's random number depends only on (seed, output position), never on its neighbours. So equal logits
give a seeded request equal tokens by itself, in any batch and after preemption; logits are equal up to
rounding, and to the bit with EngineConfig(deterministic=True).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.engine.request import Request
from octavo.engine.sampling.draw import draw
from octavo.engine.sampling.tops import ROWS_AT_ONCE, Top, Tops, log_softmax, pack_tops
from octavo.engine.structured.token_masks import TokenMasks
from octavo.errors import EngineError
from octavo.kernels.copies import to_device

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_LARGEST = torch.finfo(torch.float32).max


@dataclass(slots=True)
class TokenCounts:
    """Which tokens a request's prompt and output hold, and how often.

    Attributes:
        in_prompt: [V] float32, occurrences in the prompt.
        in_output: [V] float32, occurrences in the output.
        num_counted: output tokens counted so far.
    """

    in_prompt: Tensor
    in_output: Tensor
    num_counted: int

    @classmethod
    def of(cls, request: Request, vocab_size: int, device: torch.device) -> "TokenCounts":
        """Count the tokens of a request, all of which the host must know."""
        # One tensor: PyTorch keeps small ones in blocks of their own.
        in_prompt, in_output = torch.zeros(2, vocab_size, dtype=torch.float32, device=device)
        ids = to_device(np.array(request.token_ids, dtype=np.int64), device)
        ones = torch.ones(len(ids), dtype=torch.float32, device=device)
        num_prompt = request.num_prompt_tokens
        in_prompt.index_add_(0, ids[:num_prompt], ones[:num_prompt])
        in_output.index_add_(0, ids[num_prompt:], ones[num_prompt:])
        return cls(in_prompt, in_output, len(ids) - num_prompt)

    def add(self, token_id: Tensor) -> None:
        """Count one more output token, [1] int32 or int64."""
        self.in_output.index_add_(0, token_id, torch.ones(1, dtype=torch.float32, device=token_id.device))
        self.num_counted += 1


class _Constants(NamedTuple):
    """The parts of a request's logit changes that stay the same, on the device.

    Attributes:
        biased_ids: [B] int64 tokens of the logit bias.
        biases: [B] float32.
        stop_ids: [N] int64 tokens that min_tokens forbids.
    """

    biased_ids: Tensor
    biases: Tensor
    stop_ids: Tensor

    @classmethod
    def of(cls, request: Request, device: torch.device) -> "_Constants":
        bias = request.params.logit_bias or {}
        return cls(
            to_device(np.array(list(bias), dtype=np.int64), device),
            to_device(np.array(list(bias.values()), dtype=np.float32), device),
            to_device(np.array(sorted(request.stop_token_ids), dtype=np.int64), device),
        )


class SampledToken(NamedTuple):
    """One row's outcome.

    Attributes:
        token_id: the sampled id, -1 when `error` is set.
        top: (token id, log-probability, rank) of the most likely tokens and the sampled one, or None.
        error: set when the row's logits were not finite.
    """

    token_id: int
    top: Top | None = None
    error: EngineError | None = None

    @classmethod
    def not_finite(cls) -> "SampledToken":
        """Return the outcome of a row of NaNs or overflows: an error for this request only."""
        return cls(-1, error=not_finite("the model's logits hold no finite value"))


def not_finite(what: str) -> EngineError:
    """Return the error for NaNs or overflows."""
    return EngineError(
        f"{what} (NaN or overflow) at this position: the checkpoint may be damaged, or dtype too narrow for "
        "it (float16 ends at 65,504)"
    )


class Sampler:
    """Adjusts logits and, where no kernels do it, samples.

    Holds the token counts of requests that use penalties. They stay on the device: a step may be launched
    before the host knows the token that the last one sampled.

    Attributes:
        masks: forbids what grammars do not take.
    """

    def __init__(self, vocab_size: int, device: torch.device, masks: TokenMasks | None = None) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._counts: dict[Request, TokenCounts] = {}
        self._constants: dict[Request, _Constants] = {}
        self.masks = masks or TokenMasks(vocab_size, device)

    def release(self, request: Request) -> None:
        """Forget a finished request."""
        self._counts.pop(request, None)
        self._constants.pop(request, None)

    def reset(self) -> None:
        """Forget every request."""
        self._counts.clear()
        self._constants.clear()

    def sample(self, logits: Tensor, requests: Sequence[Request], ends: Sequence[int]) -> list[SampledToken]:
        """Sample one token for each request.

        Args:
            logits: [R, V] float32, one row per request; may be overwritten.
            requests: R requests, whose tokens the host knows.
            ends: positions of the tokens to be sampled.
        """
        tops_rows = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        logprobs = log_softmax(logits[tops_rows]) if tops_rows else None
        self.adjust_(logits, requests, ends)
        best_values, best_ids = logits.max(dim=-1)
        token_ids = best_ids.tolist()
        finite = best_values.isfinite().tolist()
        random_rows = [row for row, r in enumerate(requests) if not r.params.greedy and finite[row]]
        for start in range(0, len(random_rows), ROWS_AT_ONCE):
            rows = random_rows[start : start + ROWS_AT_ONCE]
            drawn = draw(logits[rows], best_values[rows], [requests[row] for row in rows])
            for row, token_id in zip(rows, drawn, strict=True):
                token_ids[row] = token_id
        ids = torch.tensor(token_ids, device=self.device)
        self.count(requests, ids)
        tops: dict[int, Top] = {}
        if logprobs is not None:
            nums = [requests[row].params.logprobs or 0 for row in tops_rows]
            parts = zip(logprobs.split(ROWS_AT_ONCE), ids[tops_rows].split(ROWS_AT_ONCE), strict=True)
            packed = torch.cat([pack_tops(*part, max(nums)) for part in parts])
            tops = dict(zip(tops_rows, Tops(nums, packed).read(), strict=True))
        return [
            SampledToken(id_, tops.get(row)) if is_finite else SampledToken.not_finite()
            for row, (id_, is_finite) in enumerate(zip(token_ids, finite, strict=True))
        ]

    def adjust_(self, logits: Tensor, requests: Sequence[Request], ends: Sequence[int]) -> None:
        """Apply logit bias, penalties, min_tokens and grammars to [R, V] float32 logits, in place.

        Args:
            logits: one row per request.
            requests: R requests.
            ends: positions of the tokens to be sampled.
        """
        for row, (request, end) in enumerate(zip(requests, ends, strict=True)):
            if request.adjustments:
                self._adjust(logits[row], request, end - request.num_prompt_tokens)
        self.masks.forbid_(logits, requests, ends)

    def count(self, requests: Sequence[Request], token_ids: Tensor) -> None:
        """Count the tokens, [R] int32 or int64 on the device, that requests with penalties got."""
        for row, request in enumerate(requests):
            counts = self._counts.get(request)
            if counts is not None:
                counts.add(token_ids[row : row + 1])

    def _adjust(self, row: Tensor, request: Request, num_output_tokens: int) -> None:
        """Apply the logit bias, penalties and min_tokens that a request asks for to its row [V], in place."""
        names, params = request.adjustments, request.params
        constants = self._constants.get(request)
        if constants is None:
            constants = self._constants[request] = _Constants.of(request, self.device)
        if "logit_bias" in names:
            row.index_add_(0, constants.biased_ids, constants.biases)
        if any(name in names for name in _PENALTIES):
            self._penalise(row, request, num_output_tokens)
        # For a structured output, the mask forbids them unless the grammar must end.
        if not request.is_structured and "min_tokens" in names and num_output_tokens < params.min_tokens:
            row.index_fill_(0, constants.stop_ids, -torch.inf)

    def _penalise(self, row: Tensor, request: Request, num_output_tokens: int) -> None:
        counts = self._counts.get(request)
        if counts is None or counts.num_counted != num_output_tokens:
            counts = self._counts[request] = TokenCounts.of(request, self.vocab_size, self.device)
        params = request.params
        penalty = params.repetition_penalty
        if penalty != 1:
            seen = (counts.in_prompt + counts.in_output > 0) & row.isfinite()
            # It is clamped, because an infinity would count as an error of the model.
            scaled = torch.where(row > 0, row / penalty, row * penalty).clamp_(-_LARGEST, _LARGEST)
            row.copy_(torch.where(seen, scaled, row))
        row -= params.frequency_penalty * counts.in_output
        row -= params.presence_penalty * (counts.in_output > 0)
