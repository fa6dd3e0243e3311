"""The scheduler over a real block pool and a fake model whose next token is a hash of its whole past.

The fake model reads the past back through the block table, cell by cell, so a wrong block, a lost copy or
a reused block shows as a wrong token. No torch: thousands of schedules a second.
"""

import os
import zlib
from array import array
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.request import Request, RequestStatus
from octavo.engine.scheduler import Scheduler
from octavo.engine.step.scheduled import ScheduledRequest, SchedulerOutput
from octavo.engine.step.time import StepTime, StepWork
from octavo.kv import KVCacheManager
from octavo.outputs import RequestMetrics
from octavo.sampling_params import SamplingParams

# More with FUZZ_SCHEDULES=5000.
NUM_SCHEDULES = int(os.environ.get("FUZZ_SCHEDULES", "75"))


def next_token(token_ids: Sequence[int]) -> int:
    return zlib.crc32(repr(list(token_ids)).encode()) % 50


def expected_tokens(prompt: list[int], num_new: int) -> "array[int]":
    token_ids = array("i", prompt)
    for _ in range(num_new):
        token_ids.append(next_token(token_ids))
    return token_ids


class FixedTime(StepTime):
    """Says that as many prompt tokens fit into any step."""

    def __init__(self, most: int) -> None:
        super().__init__(1.0)
        self.most = most

    def max_prompt_tokens(self, num_decode_keys: int, num_keys_before: int) -> int:
        return self.most


class FakeEngine:
    """Runs the scheduler; cells[slot] holds the token stored there.

    With `ahead` steps are scheduled before the last one's tokens are known: only the device knows them.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        caching: bool = True,
        ahead: int = 0,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self.ahead = ahead
        self.step_time = None if max_prompt_tokens is None else FixedTime(max_prompt_tokens)
        self.in_flight: deque[tuple[SchedulerOutput, dict[Request, int]]] = deque()
        self.device_tokens: dict[Request, array[int]] = {}
        self.manager = KVCacheManager(num_blocks, block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(self.manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        self.cells: dict[int, int] = {}
        self.num_computed = 0
        self.requests: list[Request] = []
        self.steps: list[SchedulerOutput] = []

    def add(self, name: str, prompt: list[int], max_tokens: int, n: int = 1) -> list[Request]:
        params = SamplingParams(n=n, max_tokens=max_tokens)
        requests = [
            Request(
                request_id=name,
                index=index,
                token_ids=array("i", prompt),
                num_prompt_tokens=len(prompt),
                params=params,
                max_num_tokens=len(prompt) + max_tokens,
                seed=0,
                stop_token_ids=frozenset(),
                blocks=self.manager.new_sequence(),
                metrics=RequestMetrics(),
            )
            for index in range(n)
        ]
        requests[0].forks = requests[1:]
        self.requests += requests
        self.scheduler.add(requests[0])
        return requests

    def step(self, *, fails: str = "") -> SchedulerOutput:
        """Schedule and launch a step, process what is due; the step due may fail at "launch" or "wait"."""
        output = self.scheduler.schedule(self.step_time)
        self.steps.append(output)
        size = self.manager.block_size
        for source, destination in output.block_copies:
            for offset in range(size):
                self.cells[destination * size + offset] = self.cells.get(source * size + offset, -1)
        if fails == "launch":
            self._process_all_but(0)
            self._fail(output)
            return output
        for item in output.scheduled:
            self._store(item)
        self.in_flight.append((output, {i.request: self._sample(i) for i in output.scheduled}))
        self.scheduler.launch(output)
        if fails == "wait" and len(self.in_flight) > self.ahead:
            self._fail(self.in_flight.popleft()[0])
        self._process_all_but(self.ahead if output.scheduled else 0)
        self.manager.check_invariants()
        return output

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.in_flight:
                return
            waits = len(self.in_flight) > 0
            output = self.step()
            assert output.scheduled or output.finished or waits, "a step with work did nothing"
        raise AssertionError("the scheduler makes no progress")

    def _slot(self, request: Request, position: int) -> int:
        index, offset = divmod(position, self.manager.block_size)
        return request.blocks.block_ids[index] * self.manager.block_size + offset

    def _store(self, item: ScheduledRequest) -> None:
        """The device's part, for all requests of a step before any is sampled from."""
        request = item.request
        token_ids = self.device_tokens.setdefault(request, request.token_ids[:])
        self.num_computed += item.num_new_tokens
        for position in range(item.start, item.end):
            self.cells[self._slot(request, position)] = token_ids[position]

    def _sample(self, item: ScheduledRequest) -> int:
        request, token_ids = item.request, self.device_tokens[item.request]
        if not item.samples:
            return -1
        past = array("i", [self._read(request, position) for position in range(item.end)])
        assert past == token_ids, "the cache does not hold the request's own tokens"
        token_ids.append(next_token(past))
        return token_ids[-1]

    def _process_all_but(self, num_kept: int) -> None:
        while len(self.in_flight) > num_kept:
            self._process(*self.in_flight.popleft())

    def _fail(self, output: SchedulerOutput) -> None:
        """What the step should have written is garbage."""
        for item in output.scheduled:
            if not item.request.is_finished:
                item.request.finish("error")
                self.scheduler.finish(item.request)
        self.in_flight.clear()
        self.manager.reset()
        unfinished = [request for request in self.requests if not request.is_finished]
        for request in unfinished:
            request.blocks = self.manager.new_sequence()
        self.scheduler.reset(unfinished)
        self.cells.clear()
        self.device_tokens.clear()
        self.manager.check_invariants()
        assert self.manager.stats().num_free == self.manager.num_blocks

    def _process(self, output: SchedulerOutput, sampled: dict[Request, int]) -> None:
        for item in output.scheduled:
            self.scheduler.commit(item)
        for item in output.scheduled:
            request = item.request
            if item.samples and not request.is_finished:
                request.append_output(sampled[request])
                assert request.token_ids == self.device_tokens[request][: len(request.token_ids)]
                if request.finish_reason:
                    self.scheduler.finish(request)

    def _read(self, request: Request, position: int) -> int:
        return self.cells[self._slot(request, position)]


in_both_ways = pytest.mark.parametrize("ahead", [0, 1])


@in_both_ways
def test_batched_equals_alone(ahead: int) -> None:
    engine = FakeEngine(num_blocks=64, block_size=4, max_num_seqs=8, budget=16, ahead=ahead)
    requests = [engine.add(str(i), [i] * (i + 1), max_tokens=9)[0] for i in range(12)]
    engine.run()
    for i, request in enumerate(requests):
        assert request.token_ids == expected_tokens([i] * (i + 1), 9)
    assert engine.manager.num_free_blocks == 64


@in_both_ways
def test_preempted_equals_undisturbed_and_makes_progress(ahead: int) -> None:
    engine = FakeEngine(num_blocks=8, block_size=2, max_num_seqs=8, budget=16, ahead=ahead)
    requests = [engine.add(str(i), [i, i + 1, i + 2], max_tokens=8)[0] for i in range(6)]
    engine.run()
    assert engine.scheduler.num_preemptions > 0, "the pool was meant to be too small"
    for i, request in enumerate(requests):
        assert request.token_ids == expected_tokens([i, i + 1, i + 2], 8)


def test_the_oldest_running_request_is_never_preempted() -> None:
    engine = FakeEngine(num_blocks=8, block_size=2, max_num_seqs=8, budget=16)
    oldest = engine.add("a", [1, 2, 3], max_tokens=12)[0]
    for i in range(5):
        engine.add(str(i), [10 + i, 2, 3], max_tokens=12)
    while not oldest.is_finished:
        engine.step()
    assert oldest.metrics.num_preemptions == 0
    assert engine.scheduler.num_preemptions > 0
    engine.run()


@in_both_ways
def test_a_lone_sequence_that_exhausts_the_pool_ends_with_length_and_a_message(ahead: int) -> None:
    engine = FakeEngine(num_blocks=3, block_size=2, max_num_seqs=4, budget=16, ahead=ahead)
    request = engine.add("a", [1, 2, 3], max_tokens=100)[0]
    engine.run()
    assert request.finish_reason == "length"
    assert request.message is not None
    assert "6 tokens" in request.message
    assert request.token_ids == expected_tokens([1, 2, 3], 4)  # 6 in the cache and the one they predict
    assert engine.manager.num_free_blocks == 3


def test_a_long_prompt_does_not_starve_decoding() -> None:
    """Trap: a batch of prompts or a batch of decodes, never mixed."""
    engine = FakeEngine(num_blocks=200, block_size=4, max_num_seqs=4, budget=8)
    short = engine.add("short", [1, 2], max_tokens=30)[0]
    engine.step()
    long = engine.add("long", list(range(100)), max_tokens=2)[0]
    while long.num_output_tokens == 0:
        output = engine.step()
        assert any(item.request is short for item in output.scheduled), "decoding waited for a prompt"
    assert short.num_output_tokens >= 12


def test_a_prompt_larger_than_the_budget_is_chunked() -> None:
    engine = FakeEngine(num_blocks=64, block_size=4, max_num_seqs=4, budget=7)
    request = engine.add("a", list(range(50)), max_tokens=3)[0]
    engine.run()
    assert request.token_ids == expected_tokens(list(range(50)), 3)
    assert max(step.num_tokens for step in engine.steps) == 7


def test_a_full_prefix_hit_still_computes_one_token() -> None:
    """Trap: a prompt that is cached to its last token leaves nothing to compute and no logits."""
    engine = FakeEngine(num_blocks=64, block_size=4, max_num_seqs=4, budget=64)
    first = engine.add("a", list(range(8)), max_tokens=2)[0]
    engine.run()
    second = engine.add("b", list(range(8)), max_tokens=2)[0]
    engine.run()
    assert second.token_ids == first.token_ids
    assert second.num_cached_tokens == 4


@in_both_ways
def test_equal_prompts_start_in_the_same_step_and_are_prefilled_once(ahead: int) -> None:
    engine = FakeEngine(num_blocks=200, block_size=4, max_num_seqs=16, budget=64, ahead=ahead)
    prompt = list(range(41))
    requests = [engine.add(str(i), prompt, max_tokens=2)[0] for i in range(8)]
    assert [item.num_new_tokens for item in engine.step().scheduled] == [41] + 7 * [1]
    engine.run()
    assert all(request.token_ids == expected_tokens(prompt, 2) for request in requests)
    assert [request.num_cached_tokens for request in requests] == [0] + 7 * [40]


def test_a_request_attaches_to_the_chunk_that_is_scheduled_and_no_further() -> None:
    engine = FakeEngine(num_blocks=200, block_size=4, max_num_seqs=16, budget=18)
    prompt = list(range(40))
    first = engine.add("first", prompt, max_tokens=2)[0]
    assert engine.step().num_tokens == 18
    twin = engine.add("twin", prompt, max_tokens=2)[0]
    assert [item.num_new_tokens for item in engine.step().scheduled] == [18]
    engine.scheduler.max_num_batched_tokens = 64
    assert [item.num_new_tokens for item in engine.step().scheduled] == [4, 4]  # both compute the last block
    assert twin.num_cached_tokens == 36
    assert twin.blocks.block_ids[:10] == first.blocks.block_ids[:10]  # of which one copy is kept
    engine.run()
    assert twin.token_ids == first.token_ids == expected_tokens(prompt, 2)


@in_both_ways
def test_shared_blocks_outlive_an_abort_of_the_request_that_computes_them(ahead: int) -> None:
    engine = FakeEngine(num_blocks=200, block_size=4, max_num_seqs=16, budget=64, ahead=ahead)
    prompt = list(range(41))
    first, second = (engine.add(str(i), prompt, max_tokens=4)[0] for i in range(2))
    engine.step()
    first.finish("abort")
    engine.scheduler.finish(first)
    third = engine.add("2", prompt, max_tokens=4)[0]
    engine.run()
    assert second.token_ids == third.token_ids == expected_tokens(prompt, 4)
    assert third.num_cached_tokens == 40


@pytest.mark.parametrize(("fails", "ahead"), [("launch", 0), ("launch", 1), ("wait", 0), ("wait", 1)])
def test_nobody_reads_what_a_failed_step_should_have_written(fails: str, ahead: int) -> None:
    engine = FakeEngine(num_blocks=200, block_size=4, max_num_seqs=16, budget=40, ahead=ahead)
    prompt = list(range(40))
    broken = engine.add("broken", prompt, max_tokens=4)[0]
    attached = engine.add("attached", prompt, max_tokens=4)[0]
    if fails == "wait" and ahead:
        engine.step()
        engine.scheduler.max_num_batched_tokens = 64
    output = engine.step(fails=fails)
    assert broken.finish_reason == "error"
    was_attached = attached in [item.request for item in output.scheduled]
    assert was_attached == (fails == "wait" and ahead == 1)
    assert attached.status is RequestStatus.WAITING
    engine.run()
    again = engine.add("again", prompt, max_tokens=4)[0]
    engine.run()
    assert attached.token_ids == again.token_ids == expected_tokens(prompt, 4)
    assert (attached.num_cached_tokens, again.num_cached_tokens) == (0, 36)


def test_forks_share_the_prompt_and_copy_only_the_tail() -> None:
    engine = FakeEngine(num_blocks=64, block_size=4, max_num_seqs=8, budget=64)
    requests = engine.add("a", list(range(10)), max_tokens=5, n=4)
    engine.step()
    copied = [copy for step in [engine.step()] for copy in step.block_copies]
    assert len(copied) == 3
    assert engine.manager.stats().num_shared == 2
    engine.run()
    assert all(request.token_ids == expected_tokens(list(range(10)), 5) for request in requests)


@in_both_ways
def test_forks_without_room_become_ordinary_requests(ahead: int) -> None:
    engine = FakeEngine(num_blocks=64, block_size=4, max_num_seqs=2, budget=64, ahead=ahead)
    requests = engine.add("a", list(range(10)), max_tokens=5, n=4)
    engine.run()
    assert all(request.token_ids == expected_tokens(list(range(10)), 5) for request in requests)


def test_forks_outlive_an_aborted_leader() -> None:
    engine = FakeEngine(num_blocks=64, block_size=4, max_num_seqs=8, budget=4)
    leader, *forks = engine.add("a", list(range(10)), max_tokens=3, n=3)
    engine.step()
    leader.finish("abort")
    engine.scheduler.finish(leader)
    engine.run()
    assert all(fork.token_ids == expected_tokens(list(range(10)), 3) for fork in forks)


def test_a_copy_never_reaches_a_block_that_changed_hands() -> None:
    engine = FakeEngine(num_blocks=5, block_size=4, max_num_seqs=8, budget=64)
    _, *forks = engine.add("a", [1, 2, 3, 4, 5, 6], max_tokens=4, n=2)
    engine.step()
    assert forks[0].status is RequestStatus.RUNNING
    forks[0].finish("abort")
    engine.scheduler.finish(forks[0])
    other = engine.add("b", [9, 9, 9], max_tokens=3)[0]
    engine.run()
    assert other.token_ids == expected_tokens([9, 9, 9], 3)


@in_both_ways
def test_a_request_that_outgrew_the_pool_ends_when_a_step_fails(ahead: int) -> None:
    """Its prompt fills the pool; the token that was sampled has no room when all is computed again."""
    engine = FakeEngine(6, 1, max_num_seqs=1, budget=6, ahead=ahead)
    request = engine.add("a", [1, 2, 3, 4, 5, 6], max_tokens=3)[0]
    other = engine.add("b", [9], max_tokens=2)[0]
    engine.step()
    engine.step(fails="launch")
    engine.run()
    assert request.finish_reason == "length"
    assert request.token_ids == expected_tokens([1, 2, 3, 4, 5, 6], 1)
    assert other.token_ids == expected_tokens([9], 2)


@in_both_ways
@pytest.mark.parametrize("caching", [True, False])
@settings(max_examples=NUM_SCHEDULES, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_schedule_gives_the_tokens_of_each_request_alone(
    caching: bool, ahead: int, data: st.DataObject
) -> None:
    num_blocks = data.draw(st.integers(6, 24), label="blocks")
    block_size = data.draw(st.integers(1, 5), label="block size")
    engine = FakeEngine(
        num_blocks,
        block_size,
        max_num_seqs=data.draw(st.integers(1, 6), label="max seqs"),
        budget=data.draw(st.integers(1, 20), label="budget"),
        caching=caching,
        ahead=ahead,
    )
    capacity = num_blocks * block_size
    added: list[tuple[list[int], int, Request]] = []
    for name in range(data.draw(st.integers(1, 8), label="requests")):
        prefix = data.draw(st.sampled_from([[], [1, 2, 3], list(range(12))]))
        own = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
        prompt = (prefix + own)[:capacity]
        max_tokens = data.draw(st.integers(1, 8))
        for request in engine.add(str(name), prompt, max_tokens, n=data.draw(st.integers(1, 3))):
            added.append((prompt, max_tokens, request))
        for _ in range(data.draw(st.integers(0, 3))):
            engine.step(fails=data.draw(st.sampled_from(["", "", "", "", "", "", "launch", "wait"])))
        if data.draw(st.integers(0, 4)) == 0:
            _, _, victim = data.draw(st.sampled_from(added))
            if not victim.is_finished:
                victim.finish("abort")
                engine.scheduler.finish(victim)
    engine.run()
    for prompt, max_tokens, request in added:
        assert request.token_ids == expected_tokens(prompt, request.num_output_tokens)
        if request.finish_reason == "length" and request.message is None:
            assert request.num_output_tokens == max_tokens
    assert engine.manager.num_free_blocks == num_blocks
    assert engine.manager.stats().num_referenced == 0


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
