"""Steps take fewer threads while other processes have the cores."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from octavo.engine.torch_settings import StepThreads


class Clock:
    """The time, and the thread's time on a core: a step's are what a test says."""

    def __init__(self) -> None:
        self.now = self.busy = 0.0

    def __call__(self) -> tuple[float, float]:
        return self.now, self.busy


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


class Steps:
    """Runs steps of 10 ms, of which the thread is on a core for a part."""

    def __init__(self) -> None:
        self._clock = Clock()
        self._threads = StepThreads(self._clock)

    def run(self, on_core: float, seconds: float = 0.01) -> int:
        with self._threads.for_step():
            num_threads = torch.get_num_threads()
            self._clock.now += seconds
            self._clock.busy += seconds * on_core
        assert torch.get_num_threads() == 4
        return num_threads


def test_an_idle_machine_gives_every_step_all_threads() -> None:
    steps = Steps()
    assert {steps.run(0.99) for _ in range(50)} == {4}


def test_steps_that_are_held_up_take_a_thread_less_each_down_to_one() -> None:
    steps = Steps()
    assert [steps.run(0.5) for _ in range(6)] == [4, 3, 2, 1, 1, 1]


def test_all_threads_are_tried_again_ever_later_and_come_back() -> None:
    steps = Steps()
    trials = [step for step in range(200) if steps.run(0.5) == 4]
    gaps = [later - sooner for sooner, later in pairwise(trials)]
    assert gaps == sorted(gaps)
    assert len(trials) < 12
    assert [steps.run(1.0) for _ in range(120)][-40:] == [4] * 40


def test_a_step_that_is_too_short_to_tell_changes_nothing() -> None:
    steps = Steps()
    assert [steps.run(0.2, seconds=0.001) for _ in range(5)] == [4] * 5


def test_a_step_that_fails_gives_the_threads_back() -> None:
    steps = Steps()
    steps.run(0.5)
    with pytest.raises(ZeroDivisionError), steps._threads.for_step():
        1 // (torch.get_num_threads() - 3)
    assert torch.get_num_threads() == 4


def test_one_thread_stays_one() -> None:
    torch.set_num_threads(1)
    with StepThreads().for_step():
        assert torch.get_num_threads() == 1
