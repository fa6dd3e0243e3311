"""How many prompt tokens fit into a step."""

import pytest

from octavo.engine.step_time import StepTime


def learned(limit_ms: float | None, *steps: tuple[int, float]) -> StepTime:
    time = StepTime(limit_ms)
    for num_tokens, ms in steps:
        time.learn(num_tokens, ms / 1000)
    return time


def test_without_a_limit_or_experience_there_is_none() -> None:
    assert learned(None, (0, 2), (1000, 12)).max_prompt_tokens is None
    assert learned(10.0, (0, 2)).max_prompt_tokens is None


def test_what_fits_is_what_decoding_leaves() -> None:
    """2 ms to decode, 10 us a token: 800 tokens are 8 ms."""
    assert learned(10.0, (0, 2), (1000, 12)).max_prompt_tokens == pytest.approx(800, abs=1)


def test_prompts_go_on_even_where_decoding_takes_the_limit() -> None:
    assert learned(1.0, (0, 2), (1000, 12)).max_prompt_tokens == 64


def test_slower_steps_count_at_once_and_faster_ones_slowly() -> None:
    slow = learned(10.0, (0, 2), (1000, 12), (1000, 22))
    assert slow.max_prompt_tokens == pytest.approx(400, abs=1)
    slow.learn(1000, 0.012)
    assert slow.max_prompt_tokens == pytest.approx(421, abs=1)
    for _ in range(100):
        slow.learn(1000, 0.012)
    assert slow.max_prompt_tokens == pytest.approx(800, abs=1)


def test_short_prompts_say_nothing() -> None:
    assert learned(10.0, (0, 2), (5, 12)).max_prompt_tokens is None
