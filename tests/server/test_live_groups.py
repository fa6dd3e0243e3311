"""The page's figures where layers fall into groups: pages, not blocks, and the windows beside prefixes."""

import pytest

from octavo.kv import CacheLayer, KVCacheManager, SequenceBlocks, plan_layout
from octavo.kv.branches import top_branches
from octavo.server.live.cells import cells_of, pages_of, parts_of

SIZE = 2
FULL, SLIDING = CacheLayer(1, 1), CacheLayer(1, 1, 4)
SHAPES = {
    "a block a page": [FULL, SLIDING],
    "3 blocks a page": [FULL, *[SLIDING] * 3],
    "2 layers a slice": [FULL, FULL, *[CacheLayer(1, 2, 4)] * 4],
    "two windows": [FULL, SLIDING, CacheLayer(1, 1, 6)],
    "windows alone": [SLIDING] * 2,
    "ordinary": [FULL],
}


def sequences_of(manager: KVCacheManager) -> list[SequenceBlocks]:
    """Compute three prompts: the second continues the first one, and the last one stands apart."""
    found = []
    for tokens in ([1] * 12, [1] * 12 + [2] * 7, [3] * 5):
        sequence = manager.new_sequence()
        start = manager.match_prefix(sequence, tokens, len(tokens) - 1)
        manager.hide(sequence, start)
        assert manager.allocate(sequence, len(tokens))
        manager.commit(sequence, tokens, len(tokens))
        found.append(sequence)
    assert found[1].block_ids[:6] == found[0].block_ids[:6]
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", [1, 2])
def test_every_page_is_shown_in_a_part_of_its_readers(shape: str, step: int) -> None:
    layout = plan_layout(SHAPES[shape], SIZE, 64)
    manager = KVCacheManager(40, SIZE, layout=layout)
    sequences, store = sequences_of(manager), manager.store
    parts = parts_of([(sequence.block_ids, len(sequence.block_ids)) for sequence in sequences])
    windows = [
        [
            (window.num_gone, store.pages(window.held, group))
            for group, window in enumerate(s.windows, start=1)
        ]
        for s in sequences
    ]
    described = [(part.start * SIZE, part.end * SIZE, part.readers) for part in parts]
    pages = pages_of(parts, windows, layout, manager.num_blocks)
    cells = cells_of(store.pool.states(step), step, pages, described)
    shown = [(readers, part) for length, readers, part in cells.runs for _ in range(length)]
    held = [set(store.held_pages(sequence)) for sequence in sequences]
    assert len(shown) == 40 // step
    for place, (num_readers, part) in enumerate(shown):
        readers = [index for index, mine in enumerate(held) if place * step in mine]
        assert (part >= 0) == bool(readers)
        assert num_readers == len(readers) or not readers
        if part >= 0:
            named = cells.parts[part][2]
            is_first = any(place * step in store.pages(sequence.block_ids) for sequence in sequences)
            # Who reads a prefix may have given back its windows; who reads some blocks of a page, not others.
            assert set(readers) <= set(named) or is_first
            assert set(named) <= set(readers) or not is_first
            assert named == readers or not is_first or layout.groups[0].blocks_per_page > 1


@pytest.mark.parametrize("shape", SHAPES)
def test_branches_say_how_many_hold_their_pages(shape: str) -> None:
    manager = KVCacheManager(40, SIZE, layout=plan_layout(SHAPES[shape], SIZE, 64))
    sequences_of(manager)
    roots = [*manager.store.tree.first_blocks]
    found = top_branches(manager.store, roots, max_branches=9, max_blocks=99)
    assert sum(branch.num_blocks for branch in found) == len(manager.store.tree) == 6 + 3 + 2
    assert [branch.num_readers for branch in found if branch.parent < 0] == [2, 1]
    assert found[0].num_hits == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_figures_count_pages(shape: str) -> None:
    manager = KVCacheManager(40, SIZE, layout=plan_layout(SHAPES[shape], SIZE, 64), bytes_per_block=1000)
    sequences = sequences_of(manager)
    stats, store = manager.stats(), manager.store
    held = [store.held_pages(sequence) for sequence in sequences]
    assert stats.num_table_entries == sum(map(len, held)) == sum(map(store.num_held_pages, sequences))
    assert stats.num_referenced == len({page for pages in held for page in pages})
    assert stats.saved_bytes == 1000 * (stats.num_table_entries - stats.num_referenced)
    # Each of the ends lacks less than a page.
    assert 0 <= stats.reserved_unfilled_tokens < 3 * stats.block_size
    assert stats.block_size == SIZE * {"3 blocks a page": 3, "2 layers a slice": 4}.get(shape, 1)
