"""A request whose pages just fit can always be computed, whatever is cached before it."""

import random

import pytest
from kv_arena import LAYERS, MAX_TOKENS, layout_of

from octavo.kv import KVCacheManager, SequenceBlocks


def compute(
    manager: KVCacheManager, sequence: SequenceBlocks, tokens: list[int], num_known: int, chunk: int
) -> bool:
    """Compute tokens as an engine does that has nothing else to do; False: they did not fit.

    Args:
        manager: of the sequence.
        sequence: an empty one.
        tokens: all that it will have.
        num_known: so many are known from the beginning.
        chunk: tokens of a step, as far as they are known.
    """
    known = tokens[:num_known]
    start = manager.match_prefix(sequence, known, num_known - 1)
    while start < num_known:
        manager.hide(sequence, start)
        end = manager.allocate_part(sequence, num_known, min(start + chunk, num_known), start)
        if end < 0:
            return False
        assert end > start
        manager.publish(sequence, known, end)
        manager.commit(sequence, known, end)
        start = end
    return True


def decode(manager: KVCacheManager, sequence: SequenceBlocks, tokens: list[int], num_known: int) -> int:
    """Compute one token after the other; return how many are known when there is no room for the next."""
    for number in range(num_known, len(tokens)):
        manager.hide(sequence, number)
        if not manager.allocate(sequence, number + 1):
            return number + 1
        manager.commit(sequence, tokens[: number + 1], number + 1)
    return len(tokens) + 1


def fill_cache(manager: KVCacheManager, rng: random.Random, most: int) -> None:
    """Serve prompts that continue one another's in parts, so that pages are shared in parts."""
    for _ in range(8):
        sequence = manager.new_sequence()
        length = rng.randint(1, most)
        tokens = [0] * (length - 1) + [rng.choice([0, 0, 1])]
        if compute(manager, sequence, tokens, length, rng.randint(1, 9)) and rng.random() < 0.5:
            forked = manager.fork(sequence, rng.randint(length - 1, length))
            if forked is not None:
                manager.free(forked[0])
        manager.free(sequence)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_what_can_ever_fit_is_computed_block_by_block(layers: str, block_size: int) -> None:
    layout, rng = layout_of(layers, block_size), random.Random(block_size)
    num_short_hits = 0
    for _ in range(30):
        num_tokens = rng.randint(block_size, MAX_TOKENS)
        manager = KVCacheManager(layout.num_pages(num_tokens), block_size, layout=layout)
        assert manager.can_ever_fit(num_tokens)
        fill_cache(manager, rng, num_tokens)
        tokens = [0] * num_tokens
        num_known, num_times = rng.randint(1, num_tokens), 0
        sequence = manager.new_sequence()
        while num_known <= num_tokens:
            # A prompt that was let in always fits.
            assert compute(manager, sequence, tokens, num_known, rng.randint(1, 9))
            num_known = decode(manager, sequence, tokens, num_known)
            if num_known <= num_tokens:
                manager.free(sequence)
                num_times += 1
            assert num_times <= num_tokens
        num_short_hits += num_times
        manager.check_invariants()
        manager.free(sequence)
        assert manager.num_free_blocks == manager.num_blocks
    # Only pages of several blocks can be shared in part.
    assert num_short_hits == 0 or layout.groups[0].blocks_per_page > 1


@pytest.mark.parametrize("layers", LAYERS)
def test_a_sequence_by_itself_never_takes_more_pages_than_the_layout_says(layers: str) -> None:
    layout = layout_of(layers, 4)
    for num_tokens in range(1, MAX_TOKENS + 1):
        manager = KVCacheManager(layout.num_pages(num_tokens), 4, layout=layout)
        assert manager.capacity >= num_tokens
        assert not manager.can_ever_fit(manager.capacity + 1)
        sequence = manager.new_sequence()
        assert compute(manager, sequence, [0] * num_tokens, num_tokens, chunk=num_tokens)
