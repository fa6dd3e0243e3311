"""The top of a prefix tree as a few branches, for people who watch an engine."""

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from octavo.kv.block_store import BlockStore


class Branch(NamedTuple):
    """Blocks in a row without a fork, read by the same number of sequences.

    Attributes:
        parent: index of the branch above it, -1 for none; smaller than its own index.
        block_id: its first block.
        num_blocks: how many blocks.
        num_readers: how many sequences hold each of them now, or another block of its page.
        num_hits: prefix lookups that found its first block, as far as the branches below were followed.
        is_cut: more blocks follow that were not looked at.
    """

    parent: int
    block_id: int
    num_blocks: int
    num_readers: int
    num_hits: int
    is_cut: bool


def top_branches(
    store: BlockStore, first_blocks: Iterable[int], *, max_branches: int, max_blocks: int
) -> list[Branch]:
    """Follow the tree down from some first blocks, all of them side by side.

    Args:
        store: holds the tree; nobody may change it during the call.
        first_blocks: where to begin; those that are not registered are left out.
        max_branches: find at most so many.
        max_blocks: look at no more blocks than this.

    Returns:
        Branches, each behind its parent.
    """
    nodes, counts = store.tree.nodes, store.pool.ref_counts
    found: list[Branch] = []
    queue = deque((-1, block_id) for block_id in first_blocks if block_id in nodes)
    cut = set[int]()
    while queue and len(found) < max_branches and max_blocks > 0:
        parent, block_id = queue.popleft()
        node, num_readers, num_blocks = nodes[block_id], counts[store.page(block_id)], 1
        num_hits = node.num_hits
        while len(node.children) == 1 and num_blocks < max_blocks:
            (child_id,) = node.children
            if counts[store.page(child_id)] != num_readers:
                break
            node = nodes[child_id]
            num_blocks += 1
            num_hits += node.num_hits
        queue.extend((len(found), child_id) for child_id in islice(node.children, max_branches))
        if len(node.children) > max_branches:
            cut.add(len(found))
        max_blocks -= num_blocks
        found.append(Branch(parent, block_id, num_blocks, num_readers, num_hits, False))
    cut.update(parent for parent, _ in queue)
    return _with_hits_below(found, cut)


def _with_hits_below(found: list[Branch], cut: set[int]) -> list[Branch]:
    """Add to each branch the hits of those below it: a lookup that found them found it, too."""
    hits = [branch.num_hits for branch in found]
    for index in range(len(found) - 1, -1, -1):
        if found[index].parent >= 0:
            hits[found[index].parent] += hits[index]
    return [
        branch._replace(num_hits=num_hits, is_cut=index in cut)
        for index, (branch, num_hits) in enumerate(zip(found, hits, strict=True))
    ]
