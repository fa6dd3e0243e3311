"""Which sequences read which blocks: block tables laid over one another."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field


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
