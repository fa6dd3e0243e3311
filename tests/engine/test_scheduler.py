"""The scheduler: any schedule gives each request the tokens it gets alone, and nothing starves."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_model import FakeEngine, expected_tokens

from octavo.engine.request import Request, RequestStatus

# More with FUZZ_SCHEDULES=5000.
NUM_SCHEDULES = int(os.environ.get("FUZZ_SCHEDULES", "75"))
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
