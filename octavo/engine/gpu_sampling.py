"""Sampling on the GPU for batches that need nothing but temperature and filters."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.engine.request import Request
from octavo.engine.sampler import SampledToken

if TYPE_CHECKING:
    from octavo.engine.triton_filters import SamplingFilters


def is_plain(request: Request) -> bool:
    """True when the kernels give all that the request asks of the sampler."""
    params = request.params
    return (
        params.logprobs is None
        and not params.logit_bias
        and params.repetition_penalty == 1
        and not params.presence_penalty
        and not params.frequency_penalty
        and params.min_tokens == 0
    )


@dataclass(frozen=True, slots=True)
class _Arguments:
    """A batch's sampling parameters on the device, [R] each.

    Attributes:
        temperatures: float32.
        seeds: int64.
        first_positions: int32, position each request's first output token is computed from.
        filters: None when no request asks for one.
    """

    temperatures: Tensor
    seeds: Tensor
    first_positions: Tensor
    filters: "SamplingFilters | None"


class GpuSampler:
    """Samples rows of logits by Gumbel-max kernels; the random numbers are keyed by (seed, output position).

    The per-request arguments stay on the device while the batch stays the same.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._batch: list[Request] = []
        self._arguments: _Arguments | None = None

    def sample(self, logits: Tensor, positions: Tensor, requests: list[Request]) -> list[SampledToken]:
        """Sample one token per row; waits for the result.

        Args:
            logits: [R, V].
            positions: [R] int32, position in its sequence of the token each row was computed from.
            requests: R requests, all plain.
        """
        from octavo.engine.triton_sampler import sample_tokens

        if requests != self._batch or self._arguments is None:
            self._batch, self._arguments = list(requests), self._make_arguments(requests)
        given = self._arguments
        ids, finite = sample_tokens(
            logits, given.temperatures, given.seeds, positions - given.first_positions, given.filters
        )
        both = torch.stack((ids, finite.to(ids.dtype))).tolist()
        return [SampledToken(id_) if ok else SampledToken.not_finite() for id_, ok in zip(*both, strict=True)]

    def _make_arguments(self, requests: list[Request]) -> _Arguments:
        from octavo.engine.triton_filters import SamplingFilters

        def column(values: list, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(self._device)

        params = [request.params for request in requests]
        filters = None
        if any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params):
            filters = SamplingFilters(
                top_k=column([max(0, p.top_k) for p in params], torch.int32),
                top_p=column([p.top_p for p in params], torch.float32),
                min_p=column([p.min_p for p in params], torch.float32),
            )
        return _Arguments(
            temperatures=column([p.temperature for p in params], torch.float32),
            # Seeds are unsigned 64-bit numbers.
            seeds=column([(r.seed + 2**63) % 2**64 - 2**63 for r in requests], torch.int64),
            first_positions=column([r.num_prompt_tokens - 1 for r in requests], torch.int32),
            filters=filters,
        )
