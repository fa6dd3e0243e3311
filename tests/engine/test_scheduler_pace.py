"""How much of a step prompts get: alone, beside sequences that somebody reads along, and with a limit."""

import pytest
from scheduler_model import FakeEngine, expected_tokens

from octavo.engine.step.pace import StepTime, StepWork


def test_prompts_get_less_while_somebody_reads_along() -> None:
    engine = FakeEngine(100, 4, 8, budget=64, max_prompt_tokens=10)
    (reader,) = engine.add("reader", [1] * 30, 20)
    assert engine.step().work.num_prompt_tokens == 30, "nobody waits for a token yet"
    engine.add("long", [2] * 40, 4)
    steps = [engine.step() for _ in range(5)]
    assert [step.work.num_prompt_tokens for step in steps] == [10, 10, 10, 10, 0]
    assert [step.num_decoding for step in steps] == [1, 1, 1, 1, 2]
    engine.run()
    assert reader.token_ids == expected_tokens([1] * 30, 20)


def test_a_steps_work_is_counted() -> None:
    engine = FakeEngine(100, 4, 8, budget=16)
    engine.add("first", [1] * 10, 20)
    assert engine.step().work == StepWork(0, 10, 50)
    engine.add("second", [2] * 40, 4)
    assert engine.step().work == StepWork(11, 15, 15 * 15 // 2)
    assert engine.step().work == StepWork(12, 15, 15 * (15 + 30) // 2)


def test_prompts_get_the_whole_budget_where_nobody_reads_along() -> None:
    engine = FakeEngine(100, 4, 8, budget=64, max_prompt_tokens=10)
    (request,) = engine.add("batch", [1] * 30, 20)
    request.is_read_along = False
    engine.step()
    engine.add("long", [2] * 40, 4)
    assert engine.step().work.num_prompt_tokens == 40


def test_long_prompts_that_are_read_along_come_one_after_the_other() -> None:
    """Each that fits into what is left joins; the others keep their turn."""
    engine = FakeEngine(900, 16, 8, budget=8192)
    for number, length in enumerate((3000, 1000, 200, 1800, 1800, 5000)):
        engine.add(str(number), [number] * length, 3)
    steps = [[item.num_new_tokens for item in engine.step().scheduled] for _ in range(3)]
    assert steps == [[3000, 1000], [1, 1, 200, 1800, 1800], [1, 1, 1, 1, 1, 5000]]
    engine.run()
    for request in engine.requests:
        assert request.token_ids == expected_tokens(list(request.token_ids[: request.num_prompt_tokens]), 3)


class ShortSteps(StepTime):
    """A device that needs 2 us for a token, and for nothing else."""

    def __init__(self, us: float = 2.0) -> None:
        super().__init__(None)
        self.us, self.asked = us, list[StepWork]()

    def seconds(self, work: StepWork) -> float | None:
        self.asked.append(work)
        return self.us * 1e-6 * work.num_prompt_tokens


def test_more_tokens_share_a_step_that_is_short() -> None:
    """8,000 tokens take 16 ms; on a slower device each step is shared by 4,096."""
    for us, expected in (
        (2.0, [[1000] * 8, [1] * 8 + [1000] * 2]),
        (4.1, [[1000] * 4, [1] * 4 + [1000] * 4]),
    ):
        engine = FakeEngine(900, 16, 16, budget=9000)
        engine.step_time = ShortSteps(us)
        for number in range(10):
            engine.add(str(number), [number] * 1000, 3)
        steps = [[item.num_new_tokens for item in engine.step().scheduled] for _ in range(2)]
        assert steps == expected


def test_the_guess_is_of_the_whole_step() -> None:
    engine = FakeEngine(900, 16, 16, budget=9000)
    engine.step_time = time = ShortSteps()
    engine.add("reader", [9] * 10, 20)
    engine.step()
    engine.add("first", [7] * 3200, 3)
    engine.add("equal", [7] * 3200 + [8] * 1600, 3)
    assert [item.num_new_tokens for item in engine.step().scheduled] == [1, 3200, 1600]
    assert time.asked == [StepWork(11, 4800, 3200 * 3200 // 2 + 1600 * (3200 + 4800) // 2)]


def test_a_prompt_whose_beginning_is_cached_counts_without_it() -> None:
    engine = FakeEngine(900, 16, 8, budget=8192)
    engine.add("first", [7] * 3200, 3)
    engine.add("long", [7] * 3200 + [8] * 800, 3)
    engine.add("other", [9] * 800, 3)
    assert [item.num_new_tokens for item in engine.step().scheduled] == [3200, 800]
    assert [item.num_new_tokens for item in engine.step().scheduled] == [1, 1, 800]


def test_where_a_steps_time_is_limited_a_prompt_begins_with_what_is_left() -> None:
    engine = FakeEngine(600, 16, 8, budget=8192, max_prompt_tokens=500)
    engine.add("reader", [1] * 10, 50)
    engine.step()
    for number in (2, 3, 4):
        engine.add(str(number), [number] * 300, 3)
    assert [item.num_new_tokens for item in engine.step().scheduled] == [1, 300, 200]


def test_prompts_that_nobody_reads_along_share_a_step() -> None:
    engine = FakeEngine(600, 16, 8, budget=8192)
    for number in range(5):
        (request,) = engine.add(str(number), [number] * 1500, 3)
        request.is_read_along = False
    assert [item.num_new_tokens for item in engine.step().scheduled] == [1500] * 5


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("max_prompt_tokens", [1, 3, 17])
def test_a_limit_changes_no_token(ahead: int, max_prompt_tokens: int) -> None:
    engine = FakeEngine(40, 4, 5, budget=20, ahead=ahead, max_prompt_tokens=max_prompt_tokens)
    prompts = [[number, *range(length)] for number, length in enumerate((3, 30, 1, 12, 25, 7, 40))]
    requests = [engine.add(str(prompt), prompt, 6, n=1 + len(prompt) % 2) for prompt in prompts]
    engine.run()
    for prompt, completions in zip(prompts, requests, strict=True):
        for request in completions:
            assert request.token_ids == expected_tokens(prompt, 6)
