"""How many prompt tokens a step may take, so that requests that are read token by token do not wait long.

    seconds of a step = base + slope * prompt tokens

Both are learned from the steps that ran. The slope rises at once and falls slowly, so that steps stay below
the limit rather than around it: prompts deep in a long context cost more per token than the first ones.
"""

import math

# Prompts go on at this pace whatever the limit is: no step is shorter than one that decodes.
_FEWEST_TOKENS = 64
# Steps with fewer prompt tokens say nothing about what one costs.
_SLOPE_TOKENS = 128
_FALL = 0.1


class StepTime:
    """Learns how long steps take, and says how many prompt tokens fit into a limit."""

    def __init__(self, max_step_ms: float | None) -> None:
        """Keep the limit; None: there is none."""
        self._limit = math.inf if max_step_ms is None else max_step_ms / 1000
        self._base = 0.0
        self._slope = 0.0

    @property
    def max_prompt_tokens(self) -> int | None:
        """Prompt tokens that fit into the next step; None: no limit."""
        if math.isinf(self._limit) or self._slope == 0:
            return None
        return max(_FEWEST_TOKENS, int((self._limit - self._base) / self._slope))

    def learn(self, num_prompt_tokens: int, seconds: float) -> None:
        """Take note of a step that took some seconds."""
        if num_prompt_tokens == 0:
            self._base = seconds if self._base == 0 else self._base + _FALL * (seconds - self._base)
        elif num_prompt_tokens >= _SLOPE_TOKENS:
            slope = max(0.0, seconds - self._base) / num_prompt_tokens
            self._slope = max(slope, self._slope + _FALL * (slope - self._slope))
