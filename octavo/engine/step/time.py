"""How long a step takes, and how many prompt tokens it may take so that nobody waits long for a token.

A step's seconds are modelled as a sum over what it does, and the weights are learned from the steps that ran:

    seconds = launch + m (if there are prompts) + a * keys read for decoding
              + b * prompt tokens + c * prompt tokens * keys before them

by recursive least squares, which forgets: clocks, batches and contexts change. Source: Haykin, "Adaptive
Filter Theory", chapter on RLS.
"""

import math
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
        error_s: the typical error of a guess, in seconds.
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
        # Unbounded, the uncertainty of weights that no step tells anything about would grow for ever.
        if uncertainty.trace() < len(_SCALES) * _UNKNOWN:
            self._uncertainty = uncertainty
        self._num_steps += 1
        if self._num_steps > _FEWEST_STEPS:
            self.error_s += 0.05 * (abs(float(error)) * _SECONDS - self.error_s)


def _features(work: StepWork) -> np.ndarray:
    return np.array([1, work.num_prompt_tokens > 0, *work]) / _SCALES
