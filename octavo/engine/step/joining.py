"""Which prompts that are read along share a step. Pure bookkeeping: no torch."""

from octavo.engine.request import Request
from octavo.engine.step.scheduled import SchedulerOutput
from octavo.engine.step.time import StepTime

FIRST_COME_TOKENS = 4096
"""Prompts share a step up to this many tokens; with more, no GPU computes faster."""
SHORT_STEP_S = 0.016
"""Or as long as the step is this short: each further step is one more wait for all that decode."""


class Joining:
    """Says which prompts may join those of one step.

    Long prompts that are read along come one after the other: together, all would wait for the last one.
    Where the limit of a step's time decides, or nobody reads along, they share what fits.
    """

    def __init__(self, output: SchedulerOutput, step_time: StepTime | None) -> None:
        """Begin with a step whose decoding sequences are scheduled.

        Args:
            output: the step, which grows meanwhile.
            step_time: guesses how long it takes; None: nothing is known of that.
        """
        self._output = output
        self._step_time = step_time

    def allows(self, request: Request, num_computed_tokens: int, budget: int) -> bool:
        """Return whether a prompt may join.

        Args:
            request: its request.
            num_computed_tokens: its tokens that are in the cache.
            budget: tokens that the step may still take.
        """
        output = self._output
        if output.is_limited or not request.is_read_along:
            return True
        work = output.prompt_work
        if work.num_prompt_tokens == 0:
            return True
        num_left = request.num_tokens - num_computed_tokens
        num_tokens = work.num_prompt_tokens + num_left
        if num_left > budget or num_tokens <= FIRST_COME_TOKENS:
            return num_left <= budget
        if self._step_time is None:
            return False
        num_keys = work.num_prompt_keys + num_left * (num_computed_tokens + request.num_tokens) // 2
        joint = output.work._replace(num_prompt_tokens=num_tokens, num_prompt_keys=num_keys)
        seconds = self._step_time.seconds(joint)
        return seconds is not None and seconds <= SHORT_STEP_S
