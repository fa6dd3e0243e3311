"""How long steps take, how many prompt tokens fit into one, and when the next one is planned.

StepTime models a step's seconds as a sum over what it does, and learns the weights from the steps that ran:

    seconds = launch + m (if there are prompts) + a * keys read for decoding
              + b * prompt tokens + c * prompt tokens * keys before them

by recursive least squares, which forgets: clocks, batches and contexts change. Source: Haykin, "Adaptive
Filter Theory", chapter on RLS.

Pace plans the next step as late as it can without leaving the device idle:

    device   | step 1            | step 2            | step 3 ...
    host        plan 2 .. requests arrive .. plan 2     plan 3
                too early                    in time

A request that arrives while step 1 runs is then in step 2. Planned at once, step 2 would not have it, and it
would wait for the end of both. The price is an estimate of how long a step takes; a margin covers its error.
"""

import math
import time
from typing import NamedTuple

import numpy as np

# Prompt tokens that every step may compute, whatever the limit is.
_FEWEST_TOKENS = 64
# Steps until the weights mean something.
_FEWEST_STEPS = 8
# A step's influence halves within 140 further steps.
_FORGET = 0.995
# Variance of the weights before the first step, scaled as below: large, so that the first steps decide.
_UNKNOWN = 1e4
# Typical sizes of each term, and of a step in seconds, which bring all weights to one scale.
_SCALES = np.array([1.0, 1.0, 1e5, 1e3, 1e6])
_SECONDS = 1e-2


class StepWork(NamedTuple):
    """What a step does.

    Attributes:
        num_decode_keys: tokens in the cache, over the sequences that decode.
        num_prompt_tokens: tokens of prompts.
        num_prompt_keys: tokens of the same prompt before each of them, summed.
    """

    num_decode_keys: int
    num_prompt_tokens: int
    num_prompt_keys: int


class StepTime:
    """Learns how long steps take.

    Attributes:
        error_s: the typical error of an estimate, in seconds.
        has_limit: whether max_prompt_tokens ever returns a number.
    """

    def __init__(self, max_step_ms: float | None) -> None:
        """Keep the limit for max_prompt_tokens; None: there is none."""
        self.error_s = 0.0
        self.has_limit = max_step_ms is not None
        self._limit = None if max_step_ms is None else max_step_ms / 1000
        self._weights = np.zeros(len(_SCALES))
        self._uncertainty = _UNKNOWN * np.eye(len(_SCALES))
        self._num_steps = 0

    def seconds(self, work: StepWork) -> float | None:
        """Return how long a step probably takes; None: too few steps have run."""
        if self._num_steps < _FEWEST_STEPS:
            return None
        return float(self._weights @ _features(work)) * _SECONDS

    def max_prompt_tokens(self, num_decode_keys: int, num_keys_before: int) -> int | None:
        """Return how many prompt tokens fit into the next step; None: there is no limit, or not yet.

        Args:
            num_decode_keys: tokens in the cache, over the sequences that will decode.
            num_keys_before: tokens in the cache of the prompt that comes next.
        """
        if self._limit is None or self._num_steps < _FEWEST_STEPS:
            return None
        launch, mixed, decode, prompt, attention = np.maximum(self._weights, 0.0) * _SECONDS / _SCALES
        left = self._limit - self.error_s - launch - mixed - decode * num_decode_keys
        # n tokens see the keys before them and half of each other: b n + a n n / 2 = what is left.
        per_token, per_pair = prompt + attention * num_keys_before, attention / 2
        if left <= 0 or per_token <= 0:
            return _FEWEST_TOKENS
        num_tokens = 2 * left / (per_token + math.sqrt(per_token**2 + 4 * per_pair * left))
        return max(_FEWEST_TOKENS, int(num_tokens))

    def learn(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that took so many seconds."""
        features = _features(work)
        gain = self._uncertainty @ features
        gain /= _FORGET + features @ gain
        error = seconds / _SECONDS - self._weights @ features
        self._weights += gain * error
        uncertainty = (self._uncertainty - np.outer(gain, features @ self._uncertainty)) / _FORGET
        # Without a bound, the uncertainty of weights that no step depends on would grow for ever.
        if uncertainty.trace() < len(_SCALES) * _UNKNOWN:
            self._uncertainty = uncertainty
        self._num_steps += 1
        if self._num_steps > _FEWEST_STEPS:
            self.error_s += 0.05 * (abs(float(error)) * _SECONDS - self.error_s)


def _features(work: StepWork) -> np.ndarray:
    return np.array([1, work.num_prompt_tokens > 0, *work]) / _SCALES


# The margin is this many times the host's time for a step plus the typical error of an estimate.
_MARGIN = 3.0
# The host's longest recent time counts, because steps that begin requests take longer than others.
_HOST_DECAY = 0.95
# Shorter waits are not worth a sleep.
_SHORTEST_S = 0.5e-3


class Pace:
    """Clocks the engine's steps, on the host and on the device.

    Attributes:
        step_time: the estimates of step times by which steps are planned.
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
            work: that of the only step in flight.
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
