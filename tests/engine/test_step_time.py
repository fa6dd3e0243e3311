"""How many prompt tokens fit into a step: learned from simulated devices whose costs are known."""

import random
from statistics import fmean

import pytest

from octavo.engine.step.pace import StepTime, StepWork

# Seconds of a launch, of having prompts at all, of a key that decoding reads, of a prompt's token, and of a
# token that sees a key.
SMALL = (1.0e-3, 1.7e-3, 3.6e-8, 2.0e-6, 3.0e-10)
LARGE = (5.0e-3, 1.0e-3, 4.0e-8, 2.4e-5, 1.0e-9)


def seconds(cost: tuple[float, ...], work: StepWork) -> float:
    terms = (1, work.num_prompt_tokens > 0, *work)
    return sum(price * amount for price, amount in zip(cost, terms, strict=True))


def prompt(num_tokens: int, start: int = 0) -> tuple[int, int]:
    return num_tokens, num_tokens * (2 * start + num_tokens) // 2


class Device:
    """Decodes a batch that grows and shrinks, and reads prompts in the largest chunks it may."""

    def __init__(self, cost: tuple[float, ...], time: StepTime, noise: float, rng: random.Random) -> None:
        self.cost, self.time, self.noise, self.rng = cost, time, noise, rng
        self.keys, self.start = 20_000, 0

    def step(self) -> tuple[float, int]:
        """Returns the seconds of a step, and its prompt tokens; 0 tokens: nobody waited."""
        self.keys = min(150_000, max(1_000, self.keys + self.rng.randint(-3_000, 3_000)))
        most = self.time.max_prompt_tokens(self.keys, self.start)
        num_tokens = min(8192 if most is None else most, 4_000 - self.start)
        if self.rng.random() < 0.2:
            num_tokens = 0
        work = StepWork(self.keys, *prompt(num_tokens, self.start))
        self.start = (self.start + num_tokens) % 4_000
        took = seconds(self.cost, work) * self.rng.gauss(1, self.noise)
        self.time.learn(work, took)
        return took, num_tokens


@pytest.mark.parametrize(("cost", "limit_ms"), [(SMALL, 9), (SMALL, 15), (LARGE, 20), (LARGE, 50)])
@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("seed", range(3))
def test_steps_fill_the_limit_and_keep_it(
    cost: tuple[float, ...], limit_ms: float, noise: float, seed: int
) -> None:
    device = Device(cost, StepTime(limit_ms), noise, random.Random(seed))
    for _ in range(100):
        device.step()
    steps = [device.step() for _ in range(1000)]
    with_prompts = [took for took, num_tokens in steps if num_tokens]
    limit = limit_ms / 1000
    assert sorted(with_prompts)[-10] <= limit * (1.02 + 3 * noise)
    # The last chunk of a prompt is shorter.
    assert fmean(with_prompts) >= limit * (0.7 - 3 * noise)


def test_a_batch_that_grows_takes_nothing_from_what_a_token_is_thought_to_cost() -> None:
    """Decoding gets slower while every step computes prompts: no step shows either cost by itself."""
    time = StepTime(12.0)
    for number in range(400):
        work = StepWork(5_000 + 250 * number, *prompt(100 + (number * 37) % 900))
        time.learn(work, seconds(SMALL, work))
    fitting = time.max_prompt_tokens(100_000, 0)
    assert fitting is not None
    assert seconds(SMALL, StepWork(100_000, *prompt(fitting))) == pytest.approx(12e-3, rel=0.02)


def test_without_experience_there_is_no_limit() -> None:
    time = StepTime(10.0)
    for _ in range(7):
        assert time.max_prompt_tokens(1000, 0) is None
        time.learn(StepWork(1000, *prompt(500)), 0.01)
    time.learn(StepWork(1000, 0, 0), 0.002)
    assert time.max_prompt_tokens(1000, 0) is not None


def test_prompts_go_on_even_where_decoding_takes_the_limit() -> None:
    device = Device(SMALL, StepTime(0.5), 0.0, random.Random(0))
    for _ in range(50):
        device.step()
    assert device.time.max_prompt_tokens(100_000, 0) == 64


def test_what_was_learned_survives_a_night_of_decoding() -> None:
    rng = random.Random(1)
    device = Device(SMALL, StepTime(9), 0.02, rng)
    for _ in range(300):
        device.step()
    for _ in range(20_000):
        work = StepWork(rng.randint(900, 1_100), 0, 0)
        device.time.learn(work, seconds(SMALL, work) * rng.gauss(1, 0.02))
    fitting = device.time.max_prompt_tokens(1_000, 0)
    assert fitting is not None
    assert 1_000 < fitting < 6_000


def test_a_device_that_slows_down_is_followed() -> None:
    device = Device(SMALL, StepTime(14), 0.01, random.Random(2))
    for _ in range(500):
        device.step()
    device.cost = tuple(2 * price for price in SMALL)
    for _ in range(1_000):
        device.step()
    took = [device.step()[0] for _ in range(200)]
    most = sorted(took)[-5]
    assert most <= 14e-3 * 1.1 or device.keys > 90_000
