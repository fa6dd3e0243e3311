"""When the engine plans its next step: as late as it can without leaving the device idle.

    device   | step 1            | step 2            | step 3 ...
    host        plan 2 .. requests arrive .. plan 2     plan 3
                too early                    in time

A request that arrives while step 1 runs is then in step 2. Planned at once, step 2 would not have it, and it
would wait for the end of both. The price is a guess of how long a step takes; a margin covers its error.
"""

import time

from octavo.engine.step.time import StepTime, StepWork

# The margin is this many times the host's time for a step plus the typical error of a guess.
_MARGIN = 3.0
# The host's longest recent time counts, because steps that begin requests take longer than others.
_HOST_DECAY = 0.95
# Shorter waits are not worth a sleep.
_SHORTEST_S = 0.5e-3


class Pace:
    """Clocks the engine's steps, on the host and on the device.

    Attributes:
        step_time: what is known of the device, to plan steps by.
    """

    def __init__(self, max_step_ms: float | None) -> None:
        """Keep EngineConfig's limit."""
        self.step_time = StepTime(max_step_ms)
        self._host_s = 0.0
        self._idle_at = 0.0

    def note_launch(self, host_s: float) -> None:
        """Take note of how long the host took to plan and launch a step."""
        self._host_s = max(host_s, _HOST_DECAY * self._host_s)

    def note_end(self, work: StepWork | None, launched_at: float) -> None:
        """Take note that the device has just ended a step.

        Args:
            work: what it did; None: nothing is learned from it.
            launched_at: when it was launched, by time.perf_counter.
        """
        begun_at, self._idle_at = self._begin(launched_at), time.perf_counter()
        if work is not None:
            self.step_time.learn(work, self._idle_at - begun_at)

    def spare_s(self, work: StepWork, launched_at: float) -> float:
        """Return how long the next step need not be planned while the device does this work; 0: plan it now.

        Args:
            work: of the only step under way.
            launched_at: when it was launched, by time.perf_counter.
        """
        seconds = self.step_time.seconds(work)
        if seconds is None:
            return 0.0
        margin = _MARGIN * (self._host_s + self.step_time.error_s)
        spare = self._begin(launched_at) + seconds - margin - time.perf_counter()
        return spare if spare >= _SHORTEST_S else 0.0

    def _begin(self, launched_at: float) -> float:
        """Return when the device began a step: at its launch, or when the previous step was done."""
        return max(launched_at, self._idle_at)
