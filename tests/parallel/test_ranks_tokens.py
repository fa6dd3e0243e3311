"""Two ranks, a process each, give the tokens of one: whatever is asked, preempted or broken off."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from alarms import alarm
from ranks_helpers import OPTIONS, other_ranks

from octavo import LLM, RequestOutput, SamplingParams

# More with FUZZ_INTERRUPTS=2000.
NUM_INTERRUPTS = int(os.environ.get("FUZZ_INTERRUPTS", "20"))
PREFIX = list(range(60, 80))
PROMPTS = [[3, 1, 4], [*PREFIX, 9, 2], [5, 8], [*PREFIX, 9, 3], list(range(3, 40))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
CASES: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "seed": SamplingParams(seed=3, max_tokens=12, ignore_eos=True),
    "large-seed": SamplingParams(seed=2**63 - 1, max_tokens=4, ignore_eos=True),
    "filters": SamplingParams(seed=4, max_tokens=12, top_k=20, top_p=0.9, min_p=0.02, temperature=1.7),
    "penalties": SamplingParams(
        seed=5, max_tokens=16, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7
    ),
    "bias-min-tokens": SamplingParams(
        temperature=0, max_tokens=9, min_tokens=4, logit_bias={2: 50.0, 7: -3.5}, stop_token_ids=[9]
    ),
    "forks": SamplingParams(seed=6, n=3, max_tokens=8, ignore_eos=True, logprobs=1),
    "prompt-logprobs": SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3),
}


@pytest.fixture(scope="module")
def two(tiny_folder: Path) -> Iterator[LLM]:
    llm = LLM(str(tiny_folder), **OPTIONS, tensor_parallel_size=2)
    yield llm
    llm.engine.close()


@pytest.fixture(scope="module")
def one(tiny_folder: Path) -> LLM:
    return LLM(str(tiny_folder), **OPTIONS)


@pytest.fixture(autouse=True)
def fresh(one: LLM, two: LLM) -> None:
    for llm in (one, two):
        llm.reset_prefix_cache()


def tokens(outputs: list[RequestOutput]) -> list[list[tuple[list[int], str | None]]]:
    return [[(c.token_ids, c.finish_reason) for c in output.outputs] for output in outputs]


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    """Every log-probability, in one list."""
    entries = [entry for output in outputs for entry in output.prompt_logprobs or [] if entry]
    entries += [entry for output in outputs for c in output.outputs for entry in c.logprobs or []]
    return [value.logprob for entry in entries for _, value in sorted(entry.items())]


def test_ranks_are_processes(two: LLM) -> None:
    assert len(other_ranks()) == 1
    assert two.engine.plan.parallel.size == 2


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_give_the_tokens_of_one(one: LLM, two: LLM, case: str) -> None:
    expected, found = (llm.generate(PROMPTS, CASES[case]) for llm in (one, two))
    assert tokens(found) == tokens(expected)
    assert [o.num_cached_tokens for o in found] == [o.num_cached_tokens for o in expected]
    assert logprobs(found) == pytest.approx(logprobs(expected), abs=1e-4)


def test_all_at_once_with_too_few_blocks(one: LLM, two: LLM) -> None:
    prompts = [prompt for prompt in PROMPTS for _ in CASES]
    params = list(CASES.values()) * len(PROMPTS)
    before = two.stats.num_preemptions
    expected, found = (llm.generate(prompts, params) for llm in (one, two))
    assert tokens(found) == tokens(expected)
    assert two.stats.num_preemptions > before


def test_the_same_batch_gives_the_same_bits_again(two: LLM) -> None:
    """Sums over ranks have one order: a batch gives the same bits each time."""
    first = two.generate(PROMPTS, GREEDY)
    two.reset_prefix_cache()
    again = two.generate(PROMPTS, GREEDY)
    assert logprobs(first) == logprobs(again)


def test_dropped_streams_are_forgotten_by_all(one: LLM, two: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for number in range(4):
        stream = two.stream([5, number], long)
        next(stream)
        next(stream)
        stream.close()
    assert tokens(two.generate(PROMPTS, GREEDY)) == tokens(one.generate(PROMPTS, GREEDY))
    assert two.stats.kv.num_referenced == 0


def test_a_prompt_larger_than_a_socket_takes_at_once(one: LLM, two: LLM) -> None:
    prompt = [number % 97 for number in range(250)]
    params = [SamplingParams(temperature=0, max_tokens=2, logit_bias=dict.fromkeys(range(101), 0.25))] * 40
    expected, found = (llm.generate([prompt] * 40, params) for llm in (one, two))
    assert tokens(found) == tokens(expected)


def test_interrupts_at_random_moments(one: LLM, two: LLM) -> None:
    """The engine starts over, and the other rank with it."""
    rng = random.Random(0)
    params = list(CASES.values())[: len(PROMPTS)]
    expected = tokens(one.generate(PROMPTS, params))
    with alarm() as it:
        num_interrupts = sum(
            it.interrupts(lambda: two.generate(PROMPTS, params), rng.uniform(1e-4, 0.1))
            for _ in range(NUM_INTERRUPTS)
        )
    assert num_interrupts > NUM_INTERRUPTS / 4
    assert tokens(two.generate(PROMPTS, params)) == expected
    assert len(other_ranks()) == 1
