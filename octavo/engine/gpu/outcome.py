"""A step's outcome on its way from the device to the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.engine.request import Request
from octavo.engine.sampling.sampler import SampledToken
from octavo.engine.sampling.tops import Tops
from octavo.engine.step.pooled import Pooled
from octavo.engine.step.result import PromptLogprobs, StepResult
from octavo.kernels.copies import to_host


class Outcome:
    """What a step sampled and found, copied to the host while the host does something else."""

    def __init__(
        self,
        requests: Sequence[Request],
        token_ids: Tensor,
        tops: Tops | None,
        places: Sequence[int],
        prompt_logprobs: Sequence[PromptLogprobs],
        stream: torch.cuda.Stream,
        pooled: Sequence[Pooled] = (),
    ) -> None:
        """Start the copy behind what the current stream has to do.

        Args:
            requests: S requests.
            token_ids: [S] int32 on a GPU, -1 where logits were not finite. The current stream must not
                overwrite it before `wait_on_device`.
            tops: log-probabilities of the requests that want them, being copied; None: nobody does.
            places: which of the S requests those are.
            prompt_logprobs: of prompt tokens that the step computed, being copied.
            stream: for the copy. The next step then begins without waiting for it: 15 us, which a copy
                between two graphs takes.
            pooled: states that the step has pooled, being copied.
        """
        self._requests = requests
        self._tops = tops
        self._places = places
        self._prompt_logprobs = prompt_logprobs
        self._pooled = pooled
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._token_ids = to_host(token_ids)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def is_copied(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._copied.query()

    def wait_on_device(self) -> None:
        """Let what is launched on the current stream from now on run after the copy."""
        self._copied.wait()

    def wait(self) -> StepResult:
        """Wait for the copies, and so for the step, and return what it found."""
        self._copied.synchronize()
        tops = {} if self._tops is None else dict(zip(self._places, self._tops.read(), strict=True))
        sampled = {
            request: SampledToken(token_id, tops.get(place)) if token_id >= 0 else SampledToken.not_finite()
            for place, (request, token_id) in enumerate(
                zip(self._requests, self._token_ids.tolist(), strict=True)
            )
        }
        return StepResult(sampled, self._prompt_logprobs, self._pooled)
