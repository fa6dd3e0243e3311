"""Snapshots: what they say of a real engine, how large they get, and what they never hold."""

import random
from collections.abc import Callable
from dataclasses import fields

import msgspec
import pytest

from octavo import SamplingParams
from octavo.engine.engine import Engine
from octavo.kv.branches import top_branches
from octavo.server.live.cells import parts_of
from octavo.server.live.snapshot import (
    MAX_BRANCHES,
    MAX_CELLS,
    MAX_NAMED_READERS,
    MAX_RUNNING_ROWS,
    MAX_WAITING_ROWS,
    Describer,
    Snapshot,
    look,
)
from octavo.server.loop.stats import Histogram, HistogramSnapshot, LoopStats

MakeEngine = Callable[..., Engine]
SYSTEM = list(range(10, 26))


def stats_of_loop() -> LoopStats:
    seconds = Histogram()
    seconds.observe(0.01, 3)
    histograms = [field.name for field in fields(LoopStats) if field.type is HistogramSnapshot]
    counts = ("num_waiting", "num_waiting_tokens", "num_live", "num_rejected", "num_prompt_tokens")
    return LoopStats(
        engine=None,
        num_finished={"stop": 2},
        num_cached_tokens=0,
        num_output_tokens=0,
        num_leaked_blocks=0,
        **dict.fromkeys(counts, 0),
        **dict.fromkeys(histograms, seconds.snapshot()),
    )


def snapshot_of(engine: Engine, describer: Describer | None = None) -> Snapshot:
    return (describer or Describer()).describe("ready", look(engine), stats_of_loop())


def readers_by_block(engine: Engine) -> dict[int, list[int]]:
    """Who reads each block, found the slow way: indices of running sequences."""
    found: dict[int, list[int]] = {}
    for index, request in enumerate(engine.scheduler.running):
        for block_id in request.blocks.block_ids:
            found.setdefault(block_id, []).append(index)
    return found


def running(engine: Engine, num_steps: int = 6) -> Engine:
    """Three prompts with a common beginning, one of them with three completions, and one apart."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
    forked = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
    engine.add_request([*SYSTEM, 40, 41], params, request_id="secret-a")
    engine.add_request([*SYSTEM, 50, 51, 52, 53, 54], forked, request_id="secret-b")
    engine.add_request([*SYSTEM, 60], params, request_id="secret-c")
    engine.add_request([70, 71, 72, 73, 74, 75], params, request_id="secret-d")
    for _ in range(num_steps):
        engine.step()
    return engine


def test_every_block_is_shown_with_its_very_readers(tiny_engine: MakeEngine) -> None:
    engine = running(tiny_engine())
    seen = snapshot_of(engine)
    pool = seen.pool
    assert pool is not None
    cells = [(readers, part) for length, readers, part in pool.runs for _ in range(length)]
    assert len(cells) == pool.num_blocks == 64
    expected = readers_by_block(engine)
    numbers = [row.number for row in seen.requests]
    assert len(set(numbers)) == len(engine.scheduler.running) == 6
    free = set(engine.manager.store.pool.free_ids)
    for block_id, (readers, part) in enumerate(cells):
        if block_id in expected:
            assert readers == len(expected[block_id])
            assert pool.parts[part][2] == [numbers[index] for index in expected[block_id]]
        else:
            assert part == -1
            assert readers == (-1 if block_id in free else 0)
    # The common beginning: four blocks, each held once for five readers.
    assert [cell[0] for cell in cells].count(5) == 4
    shared = next(part for _, readers, part in pool.runs if readers == 5)
    assert pool.parts[shared][:2] == (0, 16)
    assert (pool.num_used, pool.num_free + pool.num_cached) == (len(expected), 64 - len(expected))
    assert pool.table_entries == sum(map(len, expected.values()))


def test_the_tree_names_readers_and_hits(tiny_engine: MakeEngine) -> None:
    engine = running(tiny_engine())
    branches = snapshot_of(engine).branches
    root = max(branches, key=lambda branch: branch.num_readers)
    assert (root.parent, root.num_blocks, root.num_readers) == (-1, 4, 5)
    # The second and the third prompt found it; forks look nothing up.
    assert root.num_hits == 2
    below = [branch for branch in branches if branch.parent == branches.index(root)]
    # Blocks that have filled since: of each completion, and of the prompt that three of them share.
    assert sorted(branch.num_readers for branch in below) == [1, 1, 3]
    assert all(branch.num_blocks >= 1 and not branch.is_cut for branch in branches)
    while engine.has_unfinished_requests:
        engine.step()
    kept = snapshot_of(engine)
    assert kept.pool is not None
    assert (kept.pool.num_used, kept.pool.num_shared) == (0, 0)
    assert kept.pool.num_cached > 0
    assert {branch.num_readers for branch in kept.branches} == {0}
    assert max(branch.num_hits for branch in kept.branches) == 2
    engine.manager.check_invariants()


def test_hits_go_to_the_block_above_when_a_branch_is_dropped(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine()
    params = SamplingParams(temperature=0, max_tokens=1)
    for _ in range(3):
        engine.add_request([*SYSTEM, 1], params)
        while engine.has_unfinished_requests:
            engine.step()
    store = engine.manager.store
    (first,) = store.tree.first_blocks
    (second,) = store.tree.nodes[first].children
    assert top_branches(store, [first], max_branches=9, max_blocks=99)[0].num_hits == 2
    store.tree.remove(second)
    assert store.tree.nodes[first].num_hits == 2
    store.tree.check_invariants()


def test_requests_are_described_by_figures_alone(tiny_engine: MakeEngine) -> None:
    engine = running(tiny_engine(max_num_seqs=5), num_steps=3)
    engine.add_request([80] * 9, SamplingParams(max_tokens=4), request_id="secret-e")
    describer = Describer()
    seen = snapshot_of(engine, describer)
    # A fork that has no row yet, and the request that came last.
    assert [row.state for row in seen.requests] == ["decode"] * 5 + ["waiting"] * 2
    first = seen.requests[0]
    assert (first.state, first.prompt_tokens, first.cached_tokens) == ("decode", 18, 0)
    assert first.output_tokens == engine.scheduler.running[0].num_output_tokens > 0
    assert first.max_output_tokens == 30
    encoded = msgspec.json.encode(seen)
    assert b"secret" not in encoded
    assert msgspec.json.decode(encoded, type=Snapshot) == seen
    # Numbers stay, whoever comes and goes.
    engine.abort("secret-a")
    after = snapshot_of(engine, describer)
    assert first.number not in [row.number for row in after.requests]
    numbers = {row.number for row in after.requests}
    assert {row.number for row in seen.requests[1:]} <= numbers


def test_a_snapshot_is_small_whatever_the_pool(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine(num_blocks=20_000, max_num_seqs=100, max_num_batched_tokens=4096)
    rng = random.Random(0)
    for _ in range(140):
        prompt = [*SYSTEM[: rng.randrange(0, 16)], *(rng.randrange(3, 100) for _ in range(90))]
        engine.add_request(prompt, SamplingParams(max_tokens=200, ignore_eos=True))
    for _ in range(8):
        engine.step()
    seen = snapshot_of(engine)
    pool = seen.pool
    assert pool is not None
    assert pool.num_blocks == 20_000
    assert sum(run[0] for run in pool.runs) == -(-20_000 // pool.blocks_per_cell) <= MAX_CELLS
    assert len(seen.requests) == MAX_RUNNING_ROWS + MAX_WAITING_ROWS
    assert 0 < len(seen.branches) <= MAX_BRANCHES
    assert all(len(part[2]) <= MAX_NAMED_READERS for part in pool.parts)
    assert len(pool.parts) <= len(pool.runs) <= MAX_CELLS
    assert len(msgspec.json.encode(seen)) < 100_000
    # A cell shows the block it stands for.
    expected = readers_by_block(engine)
    cells = [readers for length, readers, _ in pool.runs for _ in range(length)]
    assert any(readers > 0 for readers in cells)
    for cell, readers in enumerate(cells):
        assert max(readers, 0) == len(expected.get(cell * pool.blocks_per_cell, ()))


def test_what_is_occupied_of_a_large_pool_is_shown_block_by_block(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine(num_blocks=5_819)
    assert snapshot_of(engine).pool.occupied is None
    running(engine)
    pool = snapshot_of(engine).pool
    assert pool.blocks_per_cell == 3
    cells = [(readers, part) for length, readers, part in pool.occupied.runs for _ in range(length)]
    expected = readers_by_block(engine)
    assert {block_id: readers for block_id, (readers, _) in enumerate(cells) if readers > 0} == {
        block_id: len(readers) for block_id, readers in expected.items()
    }
    assert len(cells) == max(expected) + 1
    assert sum(readers == 0 for readers, _ in cells) == pool.num_cached
    for block_id, (readers, part) in enumerate(cells):
        assert readers <= 0 or len(pool.occupied.parts[part][2]) == len(expected[block_id])
    # A block that is occupied behind those that are looked at: then the samples of the whole pool are shown.
    store = engine.manager.store
    far = next(block_id for block_id in store.pool.free_ids if block_id > MAX_CELLS)
    store.pool.ref_counts[far] = 1
    store.pool._free.remove(far)
    assert snapshot_of(engine).pool.occupied is None


def test_long_chains_and_many_children_are_cut(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine(num_blocks=128)
    engine.add_request(list(range(3, 83)), SamplingParams(max_tokens=4, ignore_eos=True))
    for last in range(6):
        engine.add_request([9, 9, 9, 9, last, 9, 9, 9, 9], SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    store = engine.manager.store
    roots = list(store.tree.first_blocks)
    (chain,) = top_branches(store, roots[:1], max_branches=9, max_blocks=7)
    assert (chain.num_blocks, chain.is_cut) == (7, True)
    fan = top_branches(store, roots[1:], max_branches=3, max_blocks=99)
    assert len(fan) == 3
    assert [branch.is_cut for branch in fan] == [True, False, False]
    assert top_branches(store, [127], max_branches=3, max_blocks=9) == []


@pytest.mark.parametrize("seed", range(30))
def test_parts_cut_random_forests_right(seed: int) -> None:
    rng = random.Random(seed)
    tables: list[list[int]] = []
    fresh = iter(range(10_000))
    for _ in range(rng.randrange(1, 12)):
        table = []
        if tables and rng.random() < 0.7:
            parent = rng.choice(tables)
            table = parent[: rng.randrange(len(parent) + 1)]
        tables.append(table + [next(fresh) for _ in range(rng.randrange(0, 6))])
    parts = parts_of([(table, len(table)) for table in tables])
    found = {
        block_id: (place, part.readers)
        for part in parts
        for place, block_id in enumerate(part.block_ids[part.start : part.end], part.start)
    }
    expected = {
        block_id: (tables[reader].index(block_id), [i for i, other in enumerate(tables) if block_id in other])
        for reader in range(len(tables))
        for block_id in tables[reader]
    }
    assert found == expected
    assert sum(part.end - part.start for part in parts) == len(expected)
