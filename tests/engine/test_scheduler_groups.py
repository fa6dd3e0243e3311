"""The scheduler over groups of layers: each reads what it wrote, and every request that fits ends."""

import os
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_arena import LAYERS, Arena, ids_of, layout_of
from scheduler_model import FakeEngine, expected_tokens, next_token

from octavo.engine.request import Request
from octavo.engine.scheduler import Scheduler
from octavo.engine.step.scheduled import ScheduledRequest, SchedulerOutput
from octavo.kv import KVCacheManager

NUM_SCHEDULES = int(os.environ.get("FUZZ_SCHEDULES", "60"))
BLOCK_SIZE = 2
in_both_ways = pytest.mark.parametrize("ahead", [0, 1])
every_layout = pytest.mark.parametrize("name", LAYERS)


class GroupedEngine(FakeEngine):
    """A scheduler whose fake model writes and reads the cells of every layer, in its group's blocks."""

    def __init__(self, name: str, num_tokens: int, budget: int, *, ahead: int = 0, num_more: int = 0) -> None:
        """Make a pool that just holds a sequence of so many tokens, and some pages more."""
        layout = layout_of(name, BLOCK_SIZE)
        num_pages = layout.num_pages(num_tokens) + num_more
        super().__init__(num_pages, BLOCK_SIZE, max_num_seqs=4, budget=budget, ahead=ahead)
        self.manager = KVCacheManager(num_pages, BLOCK_SIZE, layout=layout)
        self.scheduler = Scheduler(self.manager, max_num_seqs=4, max_num_batched_tokens=budget)
        self.arena = Arena(layout, num_pages)

    def _copy(self, output: SchedulerOutput) -> None:
        for source, destination in output.block_copies:
            self.arena.copy_page(source, destination)

    def _store(self, item: ScheduledRequest) -> None:
        token_ids = self.device_tokens.setdefault(item.request, item.request.token_ids[:])
        for position in range(item.start, item.end):
            prefix = (b"", tuple(token_ids[: position + 1]))
            self.arena.write(ids_of(item.request.blocks), position, prefix)

    def _sample(self, item: ScheduledRequest) -> int:
        token_ids = self.device_tokens[item.request]
        for group, block_ids in enumerate(ids_of(item.request.blocks)):
            window = self.arena.layout.groups[group].kind.window
            first = 0 if window is None else max(0, item.start + 1 - window)
            for position in range(first, item.end):
                self.arena.check(group, block_ids, position, (b"", tuple(token_ids[: position + 1])))
        if not item.samples:
            return -1
        token_ids.append(next_token(array("i", token_ids)))
        return token_ids[-1]


def check(engine: GroupedEngine, requests: list[Request]) -> None:
    engine.run()
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        num_new = request.max_num_tokens - len(prompt)
        assert request.message is None, request.message
        assert request.token_ids == expected_tokens(prompt, num_new)
    assert engine.manager.stats().num_referenced == 0


@in_both_ways
@every_layout
def test_two_long_prompts_and_decoders_end_in_a_pool_that_holds_one(name: str, ahead: int) -> None:
    engine = GroupedEngine(name, 32, 5, ahead=ahead)
    requests = engine.add("short", [1, 2], 20) + engine.add("a", [*range(26)], 5)
    requests += engine.add("b", [*range(20, 46)], 5) + engine.add("c", [3], 16, n=2)
    check(engine, requests)


@in_both_ways
@every_layout
def test_a_request_that_fits_by_itself_ends_whatever_pages_its_prefix_is_in(name: str, ahead: int) -> None:
    """Prefixes of others lie in more pages than a sequence takes by itself."""
    engine = GroupedEngine(name, 40, 40, ahead=ahead)
    requests = []
    for end in range(2, 20, BLOCK_SIZE):
        requests += engine.add(str(end), [*range(end), 49], 1)
        engine.run()
    requests += engine.add("long", [*range(20)], 20)
    check(engine, requests)


@every_layout
@pytest.mark.parametrize("length", [6, 7, 8, 17])
def test_forks_begin_though_their_leader_was_preempted_beyond_its_prompt(name: str, length: int) -> None:
    """It then has a token more, and hits all of its prompt: windows must reach back to the prompt's end."""
    engine = GroupedEngine(name, 40, 40, ahead=1, num_more=8)
    requests = engine.add("a", [*range(length)], 12, n=3)
    engine.step()
    engine.scheduler._preempt(requests[0])
    engine.step()
    assert [len(request.forks) for request in requests] == [2, 0, 0]
    check(engine, requests)


@in_both_ways
@every_layout
@settings(max_examples=NUM_SCHEDULES, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_schedule_over_groups_ends_each_request_with_its_own_tokens(
    name: str, ahead: int, data: st.DataObject
) -> None:
    draw: Callable[..., int] = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    engine = GroupedEngine(name, 36, draw(1, 20), ahead=ahead, num_more=draw(0, 6))
    requests: list[Request] = []
    for number in range(draw(1, 7)):
        prompt = [*range(draw(0, 20)), *data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))]
        requests += engine.add(str(number), prompt, draw(1, 9), n=draw(1, 3))
        for _ in range(draw(0, 3)):
            engine.step(fails="")
    check(engine, requests)
