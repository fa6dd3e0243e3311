"""Counts the tokens of a request."""

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from octavo.outputs import RequestOutput
from octavo.server.api.types import PromptTokensDetails, Usage
from octavo.server.generation import Generation


def usage_of(outputs: Sequence[RequestOutput], *, without_output: bool = False) -> Usage:
    """Return the tokens of finished prompts, each prompt counted once for its n completions.

    Args:
        outputs: of one HTTP request.
        without_output: what was generated is not shown, so it does not count.
    """
    num_output = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    return _usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        0 if without_output else num_output,
        sum(output.num_cached_tokens for output in outputs),
    )


class UsageCounter:
    """Counts the tokens of a stream.

    Attributes:
        is_continuous: every event tells what was counted so far.
    """

    def __init__(self, generation: Generation, *, continuous: bool) -> None:
        """Begin at nothing.

        Args:
            generation: the prompts.
            continuous: every event tells what was counted so far.
        """
        self.is_continuous = continuous
        self._generation = generation
        self._num_prompt = sum(len(prompt.listed) for prompt in generation.prompts)
        self._num_output = 0

    def add(self, num_tokens: int) -> None:
        """Count tokens that the client gets now."""
        self._num_output += num_tokens

    @property
    def now(self) -> Usage | UnsetType:
        """The usage that an event carries: what was counted so far, or nothing."""
        return _usage(self._num_prompt, self._num_output) if self.is_continuous else UNSET

    @property
    def final(self) -> Usage:
        """The usage of the whole request, once all outputs are finished."""
        cached = sum(output.num_cached_tokens for output in self._generation.outputs.values())
        return _usage(self._num_prompt, self._num_output, cached)


def _usage(num_prompt: int, num_output: int, num_cached: int | None = None) -> Usage:
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
        prompt_tokens_details=UNSET if num_cached is None else PromptTokensDetails(num_cached),
    )
