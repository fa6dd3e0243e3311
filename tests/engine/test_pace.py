"""How long the next step need not be planned: on a simulated clock and device."""

import pytest

from octavo.engine.step import pace
from octavo.engine.step.pace import Pace, StepWork

WORK = StepWork(1_000, 0, 0)


class Clock:
    """Stands in for the module `time`."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    return clock


def run_steps(clock: Clock, paced: Pace, step_s: float, host_s: float, number: int = 200) -> float:
    """Steps that are launched one ahead; returns when the last one was launched, which is under way."""
    launched_at = clock.now
    for _ in range(number):
        next_launched_at = clock.now
        paced.note_launch(host_s)
        clock.now = max(clock.now, launched_at) + step_s
        paced.note_end(WORK, launched_at)
        launched_at = next_launched_at
    return launched_at


def test_the_host_waits_until_shortly_before_the_device_is_done(clock: Clock) -> None:
    paced = Pace(None)
    launched_at = run_steps(clock, paced, step_s=0.010, host_s=0.001)
    assert paced.spare_s(WORK, launched_at) == pytest.approx(0.007, abs=1e-4)
    clock.now += 0.004
    assert paced.spare_s(WORK, launched_at) == pytest.approx(0.003, abs=1e-4)
    clock.now += 0.0028
    assert paced.spare_s(WORK, launched_at) == 0.0
    clock.now += 1.0
    assert paced.spare_s(WORK, launched_at) == 0.0


def test_a_slow_launch_is_remembered_for_a_while(clock: Clock) -> None:
    paced = Pace(None)
    launched_at = run_steps(clock, paced, step_s=0.010, host_s=0.0005)
    paced.note_launch(0.0025)
    assert paced.spare_s(WORK, launched_at) == pytest.approx(0.0025, abs=1e-4)
    run_steps(clock, paced, step_s=0.010, host_s=0.0005, number=100)
    assert paced.spare_s(WORK, clock.now) == pytest.approx(0.0085, abs=1e-4)


def test_a_step_as_short_as_its_launch_is_never_put_off(clock: Clock) -> None:
    paced = Pace(None)
    launched_at = run_steps(clock, paced, step_s=0.001, host_s=0.0005)
    assert paced.spare_s(WORK, launched_at) == 0.0


def test_without_experience_nothing_is_put_off(clock: Clock) -> None:
    paced = Pace(None)
    launched_at = run_steps(clock, paced, step_s=0.010, host_s=0.001, number=7)
    assert paced.spare_s(WORK, launched_at) == 0.0


def test_a_step_that_is_no_example_teaches_nothing_but_its_end(clock: Clock) -> None:
    paced = Pace(None)
    run_steps(clock, paced, step_s=0.010, host_s=0.001)
    launched_at = clock.now
    clock.now += 5.0
    paced.note_end(None, launched_at)
    assert paced.step_time.seconds(WORK) == pytest.approx(0.010, rel=1e-3)
    assert paced.spare_s(WORK, launched_at) == pytest.approx(0.007, abs=1e-4)
