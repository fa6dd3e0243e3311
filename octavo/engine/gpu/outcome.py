"""A step's outcome on its way from the device to the host."""

from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

from octavo.engine.request import Request
from octavo.engine.sampling.sampler import SampledToken, Top
from octavo.engine.step_result import PromptLogprobs, StepResult


class Outcome:
    """The tokens that a step sampled, copied to the host while the host does something else."""

    def __init__(
        self,
        requests: Sequence[Request],
        token_ids: Tensor,
        tops: Sequence[Top | None] | None = None,
        prompt_logprobs: Sequence[PromptLogprobs] = (),
    ) -> None:
        """Start the copy on the current stream.

        Args:
            requests: S requests.
            token_ids: [S] int32 on a GPU, -1 where logits were not finite. May be overwritten by the next
                step: the copy comes first on the stream.
            tops: what each request asked of its token's log-probabilities; None: nobody asked.
            prompt_logprobs: of prompt tokens that the step computed.
        """
        self._requests = requests
        self._tops = tops
        self._prompt_logprobs = prompt_logprobs
        self._token_ids = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
        self._token_ids.copy_(token_ids, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def wait(self) -> StepResult:
        """Wait for the copy, and so for the step, and return what it found."""
        self._copied.synchronize()
        sampled = [
            SampledToken(token_id, top) if token_id >= 0 else SampledToken.not_finite()
            for token_id, top in zip(self._token_ids.tolist(), self._tops or repeat(None), strict=False)
        ]
        return StepResult(dict(zip(self._requests, sampled, strict=True)), list(self._prompt_logprobs))
