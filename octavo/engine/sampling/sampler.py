"""From logits to tokens: penalties, filters, counter-based random numbers, log-probabilities.

A request's random number depends only on (seed, output position), never on its neighbours. So equal logits
give a seeded request equal tokens alone, in any batch and after preemption; logits are equal up to rounding,
and to the bit with EngineConfig(deterministic=True).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.engine.request import Request
from octavo.engine.structured.masks import TokenMasks
from octavo.errors import EngineError
from octavo.gpu.copies import to_device
from octavo.gpu.device import has_triton
from octavo.sampling_params import MAX_LOGPROBS

# (token id, log-probability, rank) of the most likely tokens and of the one in question.
Top = list[tuple[int, float, int]]

_MASK64 = 2**64 - 1
# Top-p looks at this many of the most likely tokens before it sorts all: its sets are nearly always smaller.
_NUM_CANDIDATES = 1024
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_LARGEST = torch.finfo(torch.float32).max
# More rows are taken one part after the other, so that their copies stay small.
ROWS_AT_ONCE = 16


def counter_uniform(seed: int, position: int) -> float:
    """Return a uniform number in [0, 1) that depends on (seed, position) only.

    Source: splitmix64 finaliser (Steele, Lea and Flood, 2014), applied to the mixed pair.
    """
    # 48 bits: a product with the total mass then stays below it in float64.
    return (mix_seed(mix_seed(seed, 0), position) >> 16) / 2**48


def mix_seed(seed: int, stream: int) -> int:
    """Derive an independent 64-bit seed for a stream (a completion's index, a position)."""
    z = (seed + (stream + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


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
        in_prompt, in_output = torch.zeros(2, vocab_size, device=device)
        ids = to_device(np.array(request.token_ids, dtype=np.int64), device)
        ones = torch.ones(len(ids), device=device)
        num_prompt = request.num_prompt_tokens
        in_prompt.index_add_(0, ids[:num_prompt], ones[:num_prompt])
        in_output.index_add_(0, ids[num_prompt:], ones[num_prompt:])
        return cls(in_prompt, in_output, len(ids) - num_prompt)

    def add(self, token_id: Tensor) -> None:
        """Count one more output token, [1] int32 or int64."""
        self.in_output.index_add_(0, token_id, torch.ones(1, device=token_id.device))
        self.num_counted += 1


class _Constants(NamedTuple):
    """What never changes of how a request adjusts logits, on the device.

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
        """The outcome of a row of NaNs or overflows: an error for this request alone."""
        error = EngineError("the model's logits hold no finite value (NaN or overflow) at this position")
        return cls(-1, error=error)


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
            drawn = _draw(logits[rows], best_values[rows], [requests[row] for row in rows])
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
        for row, request, end in zip(logits, requests, ends, strict=True):
            if request.adjustments:
                self._adjust(row, request, end - request.num_prompt_tokens)
        self.masks.forbid_(logits, requests, ends)

    def count(self, requests: Sequence[Request], token_ids: Tensor) -> None:
        """Count the tokens, [R] int32 or int64 on the device, that requests with penalties got."""
        for row, request in enumerate(requests):
            counts = self._counts.get(request)
            if counts is not None:
                counts.add(token_ids[row : row + 1])

    def _adjust(self, row: Tensor, request: Request, num_output_tokens: int) -> None:
        """Apply logit bias, penalties and min_tokens to one row [V], in place, where asked for."""
        asked, params = request.adjustments, request.params
        constants = self._constants.get(request)
        if constants is None:
            constants = self._constants[request] = _Constants.of(request, self.device)
        if "logit_bias" in asked:
            row.index_add_(0, constants.biased_ids, constants.biases)
        if any(name in asked for name in _PENALTIES):
            self._penalise(row, request, num_output_tokens)
        # A grammar's mask does it, unless the grammar must end.
        if not request.is_structured and "min_tokens" in asked and num_output_tokens < params.min_tokens:
            row.index_fill_(0, constants.stop_ids, -torch.inf)

    def _penalise(self, row: Tensor, request: Request, num_output_tokens: int) -> None:
        counts = self._counts.get(request)
        if counts is None or counts.num_counted != num_output_tokens:
            counts = self._counts[request] = TokenCounts.of(request, self.vocab_size, self.device)
        params = request.params
        penalty = params.repetition_penalty
        if penalty != 1:
            seen = (counts.in_prompt + counts.in_output > 0) & row.isfinite()
            # Clamped: an infinity would count as an error of the model's.
            scaled = torch.where(row > 0, row / penalty, row * penalty).clamp_(-_LARGEST, _LARGEST)
            row.copy_(torch.where(seen, scaled, row))
        row -= params.frequency_penalty * counts.in_output
        row -= params.presence_penalty * (counts.in_output > 0)


def log_softmax(logits: Tensor) -> Tensor:
    """Return the [R, V] float32 log-probabilities of [R, V] logits; on a GPU rows depend on nothing else."""
    if has_triton(logits):
        from octavo.engine.sampling import triton_logprobs

        return triton_logprobs.log_softmax(logits)
    return logits.float().log_softmax(-1)


@dataclass(frozen=True, slots=True)
class Tops:
    """The most likely tokens of some rows, on their way to the host.

    Attributes:
        nums: how many each row wants.
        packed: rows as pack_tops makes them, for the largest of nums.
    """

    nums: Sequence[int]
    packed: Tensor

    def read(self) -> list[Top]:
        """Return each row's list; on a GPU the copy must have arrived."""
        tops = []
        most = (self.packed.shape[1] - 3) // 2
        for num, (own, own_value, own_rank, *best) in zip(self.nums, self.packed.tolist(), strict=True):
            ids = [int(token_id) for token_id in best[:num]]
            top = list(zip(ids, best[most : most + num], range(1, num + 1), strict=True))
            tops.append(top if own in ids else [*top, (int(own), own_value, int(own_rank))])
        return tops


def pack_tops(logprobs: Tensor, own: Tensor, num: int) -> Tensor:
    """Find each row's most likely tokens, and its own; waits for no device.

    Args:
        logprobs: [R, V] float32 log-probabilities.
        own: [R] int64 tokens that were sampled (or stand in the prompt), on the device.
        num: how many of the most likely tokens are wanted.

    Returns:
        [R, 3 + 2 num] float64, which holds every token id: own token, its log-probability and rank, most
        likely tokens, their log-probabilities; less where the vocabulary is smaller.
    """
    # Always as many: PyTorch has other kernels for other numbers, and loads each on first use.
    best = _most_likely_ids(logprobs, min(MAX_LOGPROBS, logprobs.shape[1]))[:, :num]
    own = own[:, None]
    value = logprobs.gather(1, own)
    rank = (logprobs > value).sum(1, keepdim=True) + 1
    return torch.cat([x.double() for x in (own, value, rank, best, logprobs.gather(1, best))], dim=1)


def _most_likely_ids(logprobs: Tensor, num: int) -> Tensor:
    """[R, num] ids by falling log-probability, ties by rising id: topk itself promises no order of ties."""
    # No log-probability is positive: without the sign its bits, an integer, grow as it falls.
    keys = (logprobs.view(torch.int32) & 0x7FFFFFFF).long()
    keys.bitwise_left_shift_(32).bitwise_or_(torch.arange(logprobs.shape[1], device=logprobs.device))
    return keys.topk(num, largest=False).values & 0xFFFFFFFF


def _draw(logits: Tensor, largest: Tensor, requests: list[Request]) -> list[int]:
    """Draw one token per row by temperature, min-p, top-k, top-p and inverse CDF.

    Args:
        logits: [R, V] float32.
        largest: [R], each row's largest logit, finite.
        requests: R requests, none greedy.
    """
    device = logits.device
    temperatures = torch.tensor([r.params.temperature for r in requests], device=device)
    # Differences from the largest one overflow to -inf, which is a probability of 0; quotients would to inf.
    logits = (logits - largest[:, None]).div_(temperatures[:, None])
    uniforms = [counter_uniform(r.seed, r.num_output_tokens) for r in requests]
    probabilities = logits.softmax(-1)
    for row, request in enumerate(requests):
        _filter(probabilities[row], request)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    targets = torch.tensor(uniforms, dtype=torch.float64, device=device)[:, None] * cumulative[:, -1:]
    # right=True skips zero-probability tokens that stand exactly at the target.
    return (
        torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp(max=logits.shape[1] - 1).tolist()
    )


def _filter(probabilities: Tensor, request: Request) -> None:
    """Zero the probabilities [V] that min-p, top-k or top-p drop, in place; untouched when none is asked."""
    params = request.params
    if params.min_p > 0:
        probabilities[probabilities < params.min_p * probabilities.max()] = 0
    if params.top_k > 0 or params.top_p < 1:
        ids, kept = _most_likely(probabilities, params.top_k, params.top_p)
        probabilities.zero_()
        probabilities[ids] = kept


def _most_likely(probabilities: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Return (ids, probabilities) of the top-k tokens cut to the smallest set reaching top_p of their mass.

    A full sort is only needed when the candidates looked at first do not reach top_p.
    """
    vocab_size = probabilities.shape[0]
    limit = min(top_k, vocab_size) if top_k > 0 else vocab_size
    total = probabilities.sum()
    for num in (limit,) if top_k > 0 else (min(limit, _NUM_CANDIDATES), limit):
        values, ids = probabilities.topk(num)
        mass = values.sum() if top_k > 0 else total
        before = values.cumsum(0) - values
        # A top_p that float32 rounds to 0 keeps one token as well.
        keep = max(1, int((before < top_p * mass).sum()))
        if keep < num or num == limit:
            return ids[:keep], values[:keep]
    raise AssertionError("the full vocabulary always reaches top_p")
