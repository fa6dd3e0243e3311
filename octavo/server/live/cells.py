"""The pool as cells, and which sequences read which blocks: block tables laid over one another.

A large pool is sampled, but if little of it is occupied, that part is shown block by block.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import msgspec

from octavo.kv.block_pool import BlockPool
from octavo.kv.cache_layout import CacheLayout

MAX_CELLS = 2048
Described = tuple[int, int, list[int]]
Windows = list[tuple[int, Sequence[int]]]


@dataclass(slots=True)
class Part:
    """Blocks in a row that the same sequences read.

    Attributes:
        block_ids: a block table that holds them; it may be longer by now.
        start: index of the first of them in every reader's block table.
        end: index behind the last one.
        readers: indices of the block tables, ascending.
        followers: parts that continue it, by first block.
    """

    block_ids: Sequence[int]
    start: int
    end: int
    readers: list[int]
    followers: dict[int, "Part"] = field(default_factory=dict)


def parts_of(tables: Sequence[tuple[Sequence[int], int]]) -> list[Part]:
    """Cut S block tables into parts; every block is in one of them.

    Two tables that hold the same block hold it at the same place, and so all blocks before it: one that is
    shared stands for its whole prefix. So a search by halves finds where they differ, in O(log blocks).

    Args:
        tables: [S] block ids and how many of them count.
    """
    parts: list[Part] = []
    first: dict[int, Part] = {}
    for reader, (block_ids, length) in enumerate(tables):
        siblings, at = first, 0
        while at < length:
            part = siblings.get(block_ids[at])
            if part is None:
                part = siblings[block_ids[at]] = Part(block_ids, at, length, [reader])
                parts.append(part)
                break
            at = _first_difference(part, block_ids, min(part.end, length))
            if at < part.end:
                parts.append(_split(part, at))
            part.readers.append(reader)
            siblings = part.followers
    return parts


def _first_difference(part: Part, block_ids: Sequence[int], end: int) -> int:
    theirs = part.block_ids
    places = range(part.start + 1, end)
    return part.start + 1 + bisect_left(places, True, key=lambda at: theirs[at] != block_ids[at])


def _split(part: Part, at: int) -> Part:
    """End a part early; return the rest of it."""
    rest = Part(part.block_ids, at, part.end, part.readers.copy(), part.followers)
    part.end, part.followers = at, {part.block_ids[at]: rest}
    return rest


class Cells(msgspec.Struct, kw_only=True):
    """Cells of the pool, one after the other.

    Attributes:
        runs: (cells, readers, part): cells in a row that are alike. Readers: -1 free, 0 cached. Part: an
            index into `parts`, -1 for none.
        parts: (first token, token behind the last, numbers of the readers, not all if there are many).
    """

    runs: list[tuple[int, int, int]]
    parts: list[Described]


def occupied_states(pool: BlockPool, step: int) -> list[int]:
    """Return the state of every single block up to the last one that is not free.

    Args:
        pool: nobody may change it during the call.
        step: the step of its sampled states.

    Returns:
        The states; none if nothing is sampled, or if blocks behind MAX_CELLS are occupied.
    """
    if step == 1:
        return []
    found = pool.states(1, MAX_CELLS)
    last = max((index for index, state in enumerate(found) if state >= 0), default=-1)
    num_occupied = sum(state >= 0 for state in found)
    return found[: last + 1] if num_occupied == pool.num_blocks - pool.num_free else []


def pages_of(
    parts: Sequence[Part], windows: Sequence[Windows], layout: CacheLayout, num_pages: int
) -> list[list[int]]:
    """Return the pages that the blocks of each part are in, and those of windows beside them.

    Args:
        parts: of S block tables.
        windows: [S] of each, for other groups of layers: its first block that is there, and the pages from
            there on.
        layout: says what a block's page is.
        num_pages: of the pool.
    """
    found = []
    for part in parts:
        pages = [*layout.groups[0].pages(part.block_ids[part.start : part.end], num_pages)]
        for reader in part.readers:
            for first, held in windows[reader]:
                pages += held[max(0, part.start - first) : max(0, part.end - first)]
        found.append(pages)
    return found


def cells_of(
    states: list[int], step: int, pages: Sequence[Sequence[int]], described: list[Described]
) -> Cells:
    """Say of each state which part its page lies in.

    Args:
        states: of pages 0, step, 2 step, ... as BlockPool.states returns them.
        step: pages for each cell.
        pages: [P] of the parts of all block tables.
        described: [P] the description of each.
    """
    part_of = [-1] * len(states)
    for index, held in enumerate(pages):
        for page in held:
            if not page % step:
                part_of[page // step] = index
    cells = groupby(zip(states, part_of, strict=True))
    runs = [(sum(1 for _ in group), readers, index) for (readers, index), group in cells]
    # Parts of which no cell shows a block are left out.
    used = {index: place for place, index in enumerate(sorted({run[2] for run in runs} - {-1}))}
    return Cells(
        runs=[(length, readers, used.get(index, -1)) for length, readers, index in runs],
        parts=[described[index] for index in used],
    )
