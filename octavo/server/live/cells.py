"""The pool as cells: a large one is sampled, but what little is occupied of it is shown block by block."""

from itertools import groupby

import msgspec

from octavo.kv.block_pool import BlockPool
from octavo.server.live.readers import Part

MAX_CELLS = 2048
Described = tuple[int, int, list[int]]


class Cells(msgspec.Struct, kw_only=True):
    """Cells of the pool, one behind the other.

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
        step: of its sampled states.

    Returns:
        The states; none if nothing is sampled, or if blocks behind MAX_CELLS are occupied.
    """
    if step == 1:
        return []
    found = pool.states(1, MAX_CELLS)
    last = max((index for index, state in enumerate(found) if state >= 0), default=-1)
    num_occupied = sum(state >= 0 for state in found)
    return found[: last + 1] if num_occupied == pool.num_blocks - pool.num_free else []


def cells_of(states: list[int], step: int, parts: list[Part], described: list[Described]) -> Cells:
    """Say of each state which part its block lies in.

    Args:
        states: of blocks 0, step, 2 step, ... as BlockPool.states returns them.
        step: blocks for each cell.
        parts: [P] of all block tables.
        described: [P] what is told of each.
    """
    part_of = [-1] * len(states)
    for index, part in enumerate(parts):
        for block_id in part.block_ids[part.start : part.end]:
            if not block_id % step:
                part_of[block_id // step] = index
    cells = groupby(zip(states, part_of, strict=True))
    runs = [(sum(1 for _ in group), readers, index) for (readers, index), group in cells]
    # Parts of which no cell shows a block are left out.
    used = {index: place for place, index in enumerate(sorted({run[2] for run in runs} - {-1}))}
    return Cells(
        runs=[(length, readers, used.get(index, -1)) for length, readers, index in runs],
        parts=[described[index] for index in used],
    )
