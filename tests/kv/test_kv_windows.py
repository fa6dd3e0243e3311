"""Windows: what they give back, what hits need of them, and which of their blocks stay."""

import pytest
from kv_arena import ids_of
from kv_helpers import Managers

from octavo.errors import InvalidArgumentError
from octavo.kv import CacheLayer, KVCacheManager, SequenceBlocks, plan_layout

SIZE, WINDOW = 4, 8
FULL, SLIDING = CacheLayer(1, 1), CacheLayer(1, 1, WINDOW)
SYSTEM = list(range(100, 132))


def windowed(make: Managers, num_pages: int = 64, num_windows: int = 1, **options: object) -> KVCacheManager:
    """Make a manager of one full layer and some with a window of two blocks."""
    layout = plan_layout([FULL, *[SLIDING] * num_windows], SIZE, 1024)
    return make(num_pages, SIZE, layout=layout, **options)


def prefill(manager: KVCacheManager, sequence: SequenceBlocks, tokens: list[int], chunk: int = SIZE) -> int:
    """Match and compute a prompt in chunks; return how many tokens were found."""
    found = start = manager.match_prefix(sequence, tokens, len(tokens) - 1)
    while start < len(tokens):
        manager.hide(sequence, start)
        end = manager.allocate_part(sequence, len(tokens), min(start + chunk, len(tokens)), start)
        assert end > start
        manager.publish(sequence, tokens, end)
        manager.commit(sequence, tokens, end)
        start = end
    return found


def serve(manager: KVCacheManager, tokens: list[int], *, keep: bool = False, chunk: int = SIZE) -> int:
    sequence = manager.new_sequence(is_kept=keep)
    found = prefill(manager, sequence, tokens, chunk)
    manager.free(sequence)
    return found


def crowd(manager: KVCacheManager, num_pages: int) -> None:
    """Take pages that nobody references, and free them again."""
    other = manager.new_sequence()
    assert manager.allocate_part(other, num_pages * manager.layout.tokens_per_page, 0) == 0
    manager.free(other)


def question(number: int, length: int = 12) -> list[int]:
    return [number] * length


def test_a_long_prompt_holds_no_more_of_a_window_than_that_and_a_block(make: Managers) -> None:
    manager = windowed(make, num_pages=28)
    sequence = manager.new_sequence()
    prefill(manager, sequence, list(range(100)))
    assert len(sequence.windows[0].block_ids) == 25
    manager.hide(sequence, 100)
    assert len(sequence.windows[0].held) == WINDOW // SIZE
    assert manager.stats().num_referenced == 25 + WINDOW // SIZE


@pytest.mark.parametrize("num_tokens", range(16, 22))
def test_what_is_hidden_is_exactly_what_neither_the_last_token_nor_one_behind_it_sees(
    make: Managers, num_tokens: int
) -> None:
    manager = windowed(make)
    sequence = manager.new_sequence()
    prefill(manager, sequence, list(range(num_tokens)), chunk=64)
    manager.hide(sequence, num_tokens)
    # From the last full block's end, and from the last token, a window reaches back so far.
    first = min(num_tokens - 1, num_tokens // SIZE * SIZE) + 1 - WINDOW
    assert first // SIZE - 1 <= sequence.windows[0].num_gone <= first // SIZE


@pytest.mark.parametrize("num_tokens", range(9, 34))
def test_a_prompt_forks_at_its_last_token_after_it_was_hidden_behind_its_end(
    make: Managers, num_tokens: int
) -> None:
    manager = windowed(make)
    sequence = manager.new_sequence()
    prefill(manager, sequence, list(range(num_tokens)))
    manager.hide(sequence, num_tokens)
    forked = manager.fork(sequence, num_tokens - 1)
    assert forked is not None
    manager.hide(forked[0], num_tokens - 1)
    assert forked[0].sees_window(num_tokens - 1)


def test_forks_and_cuts_before_what_was_hidden_are_refused(make: Managers) -> None:
    manager = windowed(make)
    sequence = manager.new_sequence()
    prefill(manager, sequence, list(range(40)))
    manager.hide(sequence, 40)
    before = [list(ids) for ids in ids_of(sequence)], manager.stats()
    with pytest.raises(InvalidArgumentError, match="fork before `hide`"):
        manager.fork(sequence, 30)
    with pytest.raises(InvalidArgumentError, match="window that was given back"):
        manager.truncate(sequence, 28)
    assert ([list(ids) for ids in ids_of(sequence)], manager.stats()) == before


def test_tokens_beyond_what_windows_reach_are_not_committed(make: Managers) -> None:
    manager = windowed(make)
    sequence = manager.new_sequence()
    assert manager.allocate_part(sequence, 20, 8) == 8
    assert (sequence.capacity, sequence.reach) == (20, 8)
    for say in (manager.publish, manager.commit):
        with pytest.raises(InvalidArgumentError, match=r"0 \.\. 8 tokens"):
            say(sequence, list(range(20)), 12)


@pytest.mark.parametrize("num_tokens", range(17, 26))
@pytest.mark.parametrize("window", [3, 5, 8, 9])
def test_a_finished_request_is_found_to_its_last_full_block(
    make: Managers, num_tokens: int, window: int
) -> None:
    """Also if it ends inside a block, and its window is no multiple of one."""
    layout = plan_layout([FULL, CacheLayer(1, 1, window)], SIZE, 1024)
    manager = make(64, SIZE, layout=layout)
    tokens = list(range(num_tokens))
    sequence = manager.new_sequence()
    prefill(manager, sequence, tokens[:10])
    for number in range(10, num_tokens):
        manager.hide(sequence, number)
        assert manager.allocate(sequence, number + 1)
        manager.commit(sequence, tokens, number + 1)
    manager.hide(sequence, num_tokens)
    assert sequence.windows[0].num_gone * SIZE <= num_tokens // SIZE * SIZE + 1 - window
    manager.free(sequence)
    assert serve(manager, [*tokens, 1, 2, 3, 4, 5]) == num_tokens // SIZE * SIZE


def test_a_hit_that_lacks_a_window_is_shorter_and_counted(make: Managers) -> None:
    manager = windowed(make)
    serve(manager, [*SYSTEM, *question(1)])
    manager.reset_prefix_cache()
    holder = manager.new_sequence()
    prefill(manager, holder, [*SYSTEM, *question(1)])
    manager.hide(holder, 44)
    crowd(manager, manager.num_free_blocks)
    assert serve(manager, [*SYSTEM, *question(2)]) == 0
    stats = manager.stats()
    assert stats.prefix_lost_tokens == len(SYSTEM)
    assert stats.prefix_hit_tokens == 0
    # The one that was computed for it hangs where all find it.
    assert serve(manager, [*SYSTEM, *question(3)]) == len(SYSTEM)
    assert manager.stats().prefix_lost_tokens == len(SYSTEM)


def test_the_second_request_that_leaves_a_prefix_lets_the_third_one_hit_it_in_a_full_pool(
    make: Managers,
) -> None:
    manager = windowed(make, num_pages=40)
    assert serve(manager, [*SYSTEM, *question(1)]) == 0
    crowd(manager, manager.stats().num_free + 9)
    assert serve(manager, [*SYSTEM, *question(2)]) == 0
    # Cold ones go first: those inside the prefix, and those inside the questions.
    crowd(manager, manager.stats().num_free + 8)
    assert serve(manager, [*SYSTEM, *question(3)]) == len(SYSTEM)
    assert serve(manager, [*SYSTEM, *question(4)]) == len(SYSTEM)


@pytest.mark.parametrize("num_questions", [3, 6])
def test_a_prefix_that_is_hit_again_and_again_keeps_its_window(make: Managers, num_questions: int) -> None:
    manager = windowed(make, num_pages=48)
    for number in range(2):
        serve(manager, [*SYSTEM, *question(number)])
    for number in range(2, 2 + num_questions):
        crowd(manager, manager.stats().num_free + 6)
        assert serve(manager, [*SYSTEM, *question(number)]) == len(SYSTEM)


def test_a_hit_before_a_lost_window_keeps_the_window_that_it_used(make: Managers) -> None:
    """The next request begins there as well, though layers with all keys know more."""
    manager = windowed(make)
    for number in range(2):
        serve(manager, [*SYSTEM, *question(number)])
    long = manager.new_sequence()
    prefill(manager, long, [*SYSTEM, *question(7, 32)])
    manager.hide(long, len(SYSTEM) + 32)
    # The long one's first blocks of 7 are known, their windows are not.
    crowd(manager, manager.stats().num_free + manager.stats().num_cached // 3)
    tokens = [*SYSTEM, *question(7, 13), 5, 5, 5]
    assert serve(manager, tokens) == len(SYSTEM)
    assert manager.stats().prefix_lost_tokens > 0
    crowd(manager, manager.stats().num_free + 4)
    assert serve(manager, [*SYSTEM, *question(8)]) == len(SYSTEM)


@pytest.mark.parametrize("length", [24, 25, 26, 27])
@pytest.mark.parametrize("by_fork", [False, True])
def test_the_end_of_a_prompt_stays_warm(make: Managers, length: int, by_fork: bool) -> None:
    """So the same prompt hits again, though its answer was long, and so does one that continues it."""
    manager = windowed(make)
    prompt, answer = list(range(length)), question(9, 40)
    sequence = manager.new_sequence()
    prefill(manager, sequence, prompt)
    if by_fork:
        forked = manager.fork(sequence, length - 1)
        assert forked is not None
        manager.free(sequence)
        sequence = forked[0]
    for number in range(length - by_fork, length + 40):
        manager.hide(sequence, number)
        assert manager.allocate(sequence, number + 1)
        manager.commit(sequence, [*prompt, *answer], number + 1)
    manager.free(sequence)
    num_warm = 2 * (WINDOW // SIZE) + 1
    crowd(manager, manager.stats().num_free + manager.stats().num_cached - num_warm - 17)
    assert serve(manager, prompt) == (length - 1) // SIZE * SIZE
    assert serve(manager, [*prompt, 1, 2, 3, 4]) == length // SIZE * SIZE


def test_cold_blocks_are_evicted_before_all_others(make: Managers) -> None:
    manager = windowed(make)
    serve(manager, list(range(48)))
    pool = manager.store.pool
    # Of twelve blocks of the window, the last two stay warm, and one that a repeated prompt needs.
    num_cold = 12 - WINDOW // SIZE - 1
    cold = pool.cached_ids[:num_cold]
    assert manager.stats().num_cached == 24
    assert set(cold).isdisjoint(manager.store.tree.nodes)
    crowd(manager, manager.stats().num_free + num_cold)
    assert manager.stats().num_evictions == num_cold
    assert serve(manager, [*range(48), 0]) == 48


def test_a_chunk_leaves_no_more_warm_blocks_than_chunks_of_a_block(make: Managers) -> None:
    for chunk in (SIZE, 48):
        manager = windowed(make)
        serve(manager, list(range(48)), chunk=chunk)
        crowd(manager, manager.stats().num_free + 9)
        assert manager.stats().num_cached == 12 + 3
        assert serve(manager, [*range(48), 0]) == 48


@pytest.mark.parametrize("num_answered", [0, 20])
def test_kept_prefixes_keep_their_windows(make: Managers, num_answered: int) -> None:
    manager = windowed(make, num_pages=40, max_kept_blocks=24)
    prompt = [*SYSTEM, *question(1)]
    tokens = [*prompt, *question(2, num_answered)]
    sequence = manager.new_sequence(is_kept=True)
    prefill(manager, sequence, prompt)
    for number in range(len(prompt), len(tokens)):
        manager.hide(sequence, number)
        assert manager.allocate(sequence, number + 1)
        manager.commit(sequence, tokens, number + 1)
    manager.free(sequence)
    crowd(manager, manager.num_blocks - manager.store.pool.num_kept)
    assert serve(manager, [*prompt, 3]) == len(prompt)


@pytest.mark.parametrize("num_tokens", range(33, 45))
@pytest.mark.parametrize("num_windows", [1, 3])
def test_windows_hit_exactly_at_a_branch(make: Managers, num_tokens: int, num_windows: int) -> None:
    """A request that leaves a live one's tokens anywhere begins at the last block that is there."""
    manager = windowed(make, num_windows=num_windows)
    tokens = list(range(60))
    live = manager.new_sequence()
    prefill(manager, live, tokens[:num_tokens], chunk=64)
    probe = manager.new_sequence()
    prompt = [*tokens[:num_tokens], 7, 7, 7, 7]
    assert manager.match_prefix(probe, prompt, len(prompt) - 1) == num_tokens // SIZE * SIZE
    first = max(0, num_tokens // SIZE - WINDOW // SIZE)
    for ids, theirs in zip(ids_of(probe), ids_of(live), strict=True):
        assert ids[first : num_tokens // SIZE] == theirs[first : num_tokens // SIZE]


def test_a_window_is_evicted_by_itself(make: Managers) -> None:
    manager = windowed(make)
    serve(manager, SYSTEM)
    num_nodes = len(manager.store.tree)
    crowd(manager, manager.stats().num_free + 3)
    assert len(manager.store.tree) == num_nodes


def test_a_first_block_that_is_evicted_takes_its_windows_along(make: Managers) -> None:
    manager = windowed(make)
    serve(manager, SYSTEM)
    manager.reset_prefix_cache()
    assert manager.stats().num_free == 64
    assert not any(manager.store.registry.hanging)


def test_a_block_that_collided_and_a_fork_of_it_are_registered_once(make: Managers) -> None:
    """A fork shares a full block that is not registered; later both may register it."""
    layout = plan_layout([FULL, SLIDING, SLIDING], SIZE, 64)
    manager = make(64, SIZE, layout=layout, hash_block=lambda parent, content: content[-4:])
    other, parent = manager.new_sequence(), manager.new_sequence()
    prefill(manager, other, [1, 1, 1, 9])
    prefill(manager, parent, [2, 2, 2, 9, 5])
    assert parent.num_committed == 0
    forked = manager.fork(parent, 4)
    assert forked is not None
    child = forked[0]
    manager.free(other)
    manager.reset_prefix_cache()
    manager.commit(parent, [2, 2, 2, 9, 5], 5)
    assert manager.allocate(child, 5)
    manager.commit(child, [2, 2, 2, 9, 6], 5)
    assert parent.num_committed == child.num_committed == 1
    manager.check_invariants()
    manager.free(parent)
    manager.free(child)
    manager.reset_prefix_cache()
    assert manager.stats().num_free == 64


def test_a_page_of_several_blocks_that_two_share_is_not_cut_into(make: Managers) -> None:
    """Without prefix caching no block can be hit, yet a fork reads it, whose window is further on."""
    manager = windowed(make, num_windows=3, enable_prefix_caching=False)
    parent = manager.new_sequence()
    prefill(manager, parent, list(range(24)))
    forked = manager.fork(parent, 24)
    assert forked is not None
    child = forked[0]
    assert not manager.can_cut(parent, 22)
    assert manager.allocate(child, 40)
    manager.commit(child, list(range(40)), 40)
    manager.hide(child, 40)
    assert not manager.can_cut(parent, 22)
    manager.free(child)
    assert manager.can_cut(parent, 22)


def test_a_100k_prompt_costs_no_more_a_block_than_a_short_one(make: Managers) -> None:
    """Nothing is looked at again for each block: counted in looks at what hangs on nodes."""

    class Counted(dict[int, int]):
        looks = 0

        def __contains__(self, key: object) -> bool:
            Counted.looks += 1
            return super().__contains__(key)

    manager = windowed(make, num_pages=60_000)
    tokens = list(range(100_000))
    holder = manager.new_sequence()
    prefill(manager, holder, tokens, chunk=8192)
    manager.hide(holder, len(tokens))
    crowd(manager, manager.num_free_blocks)
    manager.store.registry.hanging[0] = Counted(manager.store.registry.hanging[0])
    probe = manager.new_sequence()
    assert manager.match_prefix(probe, [*tokens, 1], 100_000) == 100_000
    assert Counted.looks <= WINDOW // SIZE
    # One that leaves it looks once in each window.
    assert manager.match_prefix(manager.new_sequence(), tokens, 90_000) == 0
    assert Counted.looks <= 90_000 // WINDOW + 10
