"""A view of an engine at work for people: its pool, its prefixes, its requests. It never shows a prompt or an
id.

engine's thread   look       copies what the next step changes: bounded, whatever the pool
event loop        Describer  makes a snapshot of it
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

import msgspec

from octavo.engine.engine import Engine
from octavo.engine.engine_stats import EngineStats
from octavo.engine.request import Request
from octavo.kv.block_store import BlockStore
from octavo.kv.branches import Branch, top_branches
from octavo.kv.cache_layout import CacheLayout
from octavo.server.live.cells import (
    MAX_CELLS,
    Cells,
    Part,
    Windows,
    cells_of,
    occupied_states,
    pages_of,
    parts_of,
)
from octavo.server.loop.stats import HistogramSnapshot, LoopStats

MAX_RUNNING_ROWS, MAX_WAITING_ROWS, MAX_NAMED_READERS = 48, 16, 12
MAX_BRANCHES = 64
_MAX_BRANCH_BLOCKS, _MAX_FIRST_BLOCKS = 768, 32

_Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Look:
    """A view of the engine between two steps.

    Attributes:
        stats: counters.
        block_size: tokens per block.
        blocks_per_cell: a large pool is sampled: each cell shows the first of so many blocks.
        cells: reference count of each cell's block; -1 if it is free.
        occupied: the same of every single block up to the last one that is not free, if `cells` is sampled
            and they are at most MAX_CELLS; else none.
        rows: (request id, index) and figures of those that run or wait; not all of them if there are many.
        keys: [S] (request id, index) of every sequence that has blocks.
        tables: [S] the block ids of each, a list that only grows, and how many there were.
        windows: [S] the pages of each in groups of layers behind the first one; see pages_of.
        layout: says which page a block is in.
        branches: those of the prefix tree.
    """

    stats: EngineStats
    block_size: int
    blocks_per_cell: int
    cells: list[int]
    occupied: list[int]
    rows: list[tuple[_Key, "RequestRow"]]
    keys: list[_Key]
    tables: list[tuple[Sequence[int], int]]
    windows: list[Windows]
    layout: CacheLayout
    branches: list[Branch]


class RequestRow(msgspec.Struct):
    """One completion that runs or waits.

    Attributes:
        state: "waiting", "preempted" (waits again), "prefill" or "decode".
        prompt_tokens: length of its prompt.
        cached_tokens: how many of them came from the prefix cache.
        computed_tokens: tokens whose keys and values are in the pool.
        output_tokens: tokens written.
        max_output_tokens: where it ends at the latest.
        blocks: blocks it reads, or pages of several.
        age_s: seconds since it arrived.
        number: the sequence's number, counted since a viewer came; `request` likewise, the same for its
            siblings.
    """

    state: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    max_output_tokens: int
    blocks: int
    age_s: float
    number: int = 0
    request: int = 0


class Pool(Cells, kw_only=True):
    """The block pool.

    Attributes:
        num_blocks, block_size, blocks_per_cell: as in Look; the counts below are exact. With several groups
            of layers they are pages.
        tokens_per_block: tokens that a page holds of layers with all keys.
        table_entries: blocks that a copy for each sequence would take.
        occupied: as in Look, None where there are none.
    """

    num_blocks: int
    block_size: int
    tokens_per_block: int
    bytes_per_block: int
    blocks_per_cell: int
    num_free: int
    num_cached: int
    num_used: int
    num_shared: int
    table_entries: int
    occupied: Cells | None


class Counts(msgspec.Struct):
    """Counters and gauges; see EngineStats, KVStats and LoopStats."""

    running: int
    waiting: int
    live: int
    rejected: int
    finished: dict[str, int]
    steps: int
    computed_tokens: int
    output_tokens: int
    preemptions: int
    looked_up_tokens: int
    found_tokens: int
    late_compiled: int
    late_captured: int
    late_allocated: int


class Buckets(msgspec.Struct):
    """A histogram: counts has one entry more than bounds, which are upper bounds in seconds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    p50: float | None
    p99: float | None


class Snapshot(msgspec.Struct, omit_defaults=True):
    """The contents of the page; without an engine, only the state.

    Attributes:
        state: as EngineLoop.state.
        time_s: seconds of a clock; only differences mean anything.
        branches: as octavo.kv.branches.Branch.
    """

    state: str
    time_s: float
    pool: Pool | None = None
    counts: Counts | None = None
    requests: list[RequestRow] = []
    branches: list[Branch] = []
    first_token: Buckets | None = None
    inter_token: Buckets | None = None


def look(engine: Engine) -> Look:
    """Copy what a snapshot needs. Call it in the engine's thread, between two steps."""
    stats = engine.stats()
    store, scheduler = engine.manager.store, engine.scheduler
    blocks_per_cell = -(-stats.kv.num_blocks // MAX_CELLS)
    now = time.monotonic()
    running = [*scheduler.running]
    shown = chain(running[:MAX_RUNNING_ROWS], islice(scheduler.waiting, MAX_WAITING_ROWS))
    tables: list[tuple[Sequence[int], int]] = [
        (request.blocks.block_ids, len(request.blocks.block_ids)) for request in running
    ]
    oldest, newest = store.tree.first_blocks, reversed(store.tree.first_blocks)
    first_blocks = dict.fromkeys(
        chain(
            (block_ids[0] for block_ids, length in tables[:_MAX_FIRST_BLOCKS] if length),
            islice(oldest, _MAX_FIRST_BLOCKS),
            islice(newest, _MAX_FIRST_BLOCKS),
        )
    )
    return Look(
        stats=stats,
        block_size=engine.plan.block_size,
        blocks_per_cell=blocks_per_cell,
        cells=store.pool.states(blocks_per_cell),
        occupied=occupied_states(store.pool, blocks_per_cell),
        rows=[((request.request_id, request.index), _row(request, store, now)) for request in shown],
        keys=[(request.request_id, request.index) for request in running],
        tables=tables,
        windows=[_windows(request, store) for request in running],
        layout=store.layout,
        branches=top_branches(store, first_blocks, max_branches=MAX_BRANCHES, max_blocks=_MAX_BRANCH_BLOCKS),
    )


def _windows(request: Request, store: BlockStore) -> Windows:
    windows = enumerate(request.blocks.windows, start=1)
    return [(window.num_gone, store.pages(window.held, group)) for group, window in windows]


def _row(request: Request, store: BlockStore, now: float) -> RequestRow:
    if request.row < 0:
        # A fork has begun with its leader, even if there is no row for it yet.
        was_running = request.has_begun and (request.index == 0 or request.num_output_tokens > 0)
        state = "preempted" if was_running else "waiting"
    else:
        state = "prefill" if request.num_computed_tokens < request.num_prompt_tokens else "decode"
    return RequestRow(
        state=state,
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.num_cached_tokens,
        computed_tokens=request.num_computed_tokens,
        output_tokens=request.num_output_tokens,
        max_output_tokens=request.max_num_tokens - request.num_prompt_tokens,
        blocks=store.num_held_pages(request.blocks),
        age_s=round(now - request.metrics.arrival_s, 2),
    )


class Describer:
    """Makes snapshots, in which a request keeps its number for as long as it is seen."""

    def __init__(self) -> None:
        self._sequences: dict[_Key, int] = {}
        self._requests: dict[str, int] = {}
        self._num_sequences = self._num_requests = 0

    def describe(self, state: str, seen: Look, stats: LoopStats) -> Snapshot:
        """Make a snapshot of a look and of the loop's own figures."""
        self._number([*seen.keys, *(key for key, _ in seen.rows)])
        for key, row in seen.rows:
            row.number, row.request = self._sequences[key], self._requests[key[0]]
        return Snapshot(
            state=state,
            time_s=time.monotonic(),
            pool=_pool(seen, [self._sequences[key] for key in seen.keys]),
            counts=_counts(seen.stats, stats),
            requests=[row for _, row in seen.rows],
            branches=seen.branches,
            first_token=_buckets(stats.first_token_s),
            inter_token=_buckets(stats.inter_token_s),
        )

    def _number(self, keys: list[_Key]) -> None:
        """Give numbers to those that are new; forget those that are gone."""
        sequences, requests = self._sequences, self._requests
        self._sequences, self._requests = {}, {}
        for key in dict.fromkeys(keys):
            if key not in sequences:
                self._num_sequences += 1
                sequences[key] = self._num_sequences
            if key[0] not in requests:
                self._num_requests += 1
                requests[key[0]] = self._num_requests
            self._sequences[key], self._requests[key[0]] = sequences[key], requests[key[0]]


def _pool(seen: Look, numbers: list[int]) -> Pool:
    kv = seen.stats.kv
    parts = parts_of(seen.tables)
    described = [_described(part, seen.block_size, numbers) for part in parts]
    pages = pages_of(parts, seen.windows, seen.layout, kv.num_blocks)
    cells = cells_of(seen.cells, seen.blocks_per_cell, pages, described)
    return Pool(
        num_blocks=kv.num_blocks,
        block_size=seen.block_size,
        tokens_per_block=kv.block_size,
        bytes_per_block=kv.bytes_per_block,
        blocks_per_cell=seen.blocks_per_cell,
        num_free=kv.num_free,
        num_cached=kv.num_cached,
        num_used=kv.num_referenced,
        num_shared=kv.num_shared,
        table_entries=kv.num_table_entries,
        runs=cells.runs,
        parts=cells.parts,
        occupied=cells_of(seen.occupied, 1, pages, described) if seen.occupied else None,
    )


def _described(part: Part, block_size: int, numbers: list[int]) -> tuple[int, int, list[int]]:
    readers = [numbers[reader] for reader in part.readers[:MAX_NAMED_READERS]]
    return part.start * block_size, part.end * block_size, readers


def _counts(engine: EngineStats, loop: LoopStats) -> Counts:
    return Counts(
        running=engine.num_running,
        waiting=loop.num_waiting,
        live=loop.num_live,
        rejected=loop.num_rejected,
        finished=dict(loop.num_finished),
        steps=engine.num_steps,
        computed_tokens=engine.num_computed_tokens,
        output_tokens=engine.num_output_tokens,
        preemptions=engine.num_preemptions,
        looked_up_tokens=engine.kv.prefix_query_tokens,
        found_tokens=engine.kv.prefix_hit_tokens,
        late_compiled=engine.late_work.compiled,
        late_captured=engine.late_work.captured,
        late_allocated=engine.late_work.allocated,
    )


def _buckets(histogram: HistogramSnapshot) -> Buckets:
    return Buckets(histogram.bounds, histogram.counts, histogram.quantile(0.5), histogram.quantile(0.99))
