"""Finds full blocks by their tokens and the blocks before them: both a hash index and a tree."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from octavo.kv.sequence_blocks import BlockKey

ROOT = -1
"""Parent of first blocks."""


@dataclass(slots=True)
class PrefixNode:
    """One registered block.

    Attributes:
        key: digest and contents.
        parent_id: block id of the registered block before it, or ROOT.
        children: block ids of the registered blocks that continue it (a dict as a small ordered set).
    """

    key: BlockKey
    parent_id: int
    children: dict[int, None] = field(default_factory=dict)


class PrefixTree:
    """Registered blocks, found by chained digest, verified by parent and contents.

        ROOT --- [you are] --- [a helpful] --- [assistant]
                     |-------- [a pirate.]

    The digest only speeds the search up. A hit also needs equal contents and the very parent the search
    came from, so by induction the whole prefix (and the salt) is equal even if every digest collides.

    A registered block's parent is always registered: dropping a block drops everything below it. Sequences
    release their tails first, so the least recently used block is nearly always a leaf.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, PrefixNode] = {}
        self._by_digest: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._nodes

    def find(self, parent_id: int, key: BlockKey) -> int | None:
        """Return the block that continues `parent_id` (a block id or ROOT) with `key`, or None."""
        block_id = self._by_digest.get(key.digest)
        if block_id is None:
            return None
        node = self._nodes[block_id]
        return block_id if node.parent_id == parent_id and node.key.content == key.content else None

    def longest_match(self, keys: Iterable[BlockKey], known: Sequence[int] = ()) -> list[int]:
        """Return the registered blocks that equal the first of `keys`, as many as there are in a row.

        Args:
            keys: of a sequence's blocks.
            known: registered blocks that are known to equal those before: the result begins with them.
        """
        block_ids = list(known)
        parent_id = block_ids[-1] if block_ids else ROOT
        for key in keys:
            block_id = self.find(parent_id, key)
            if block_id is None:
                break
            block_ids.append(block_id)
            parent_id = block_id
        return block_ids

    def find_or_insert(self, block_id: int, parent_id: int, key: BlockKey) -> int | None:
        """Register a full block unless an equal one is registered.

        Returns:
            The registered block: `block_id` itself or the equal one; None when a different block has the
            same digest, in which case the new one cannot be registered.
        """
        if key.digest in self._by_digest:
            return self.find(parent_id, key)
        assert block_id not in self._nodes, f"block {block_id} is already registered"
        self._nodes[block_id] = PrefixNode(key, parent_id)
        self._by_digest[key.digest] = block_id
        if parent_id != ROOT:
            self._nodes[parent_id].children[block_id] = None
        return block_id

    def remove(self, block_id: int) -> list[int]:
        """Drop a block and everything below it.

        Returns:
            The dropped block ids, `block_id` first.
        """
        parent = self._nodes.get(self._nodes[block_id].parent_id)
        if parent is not None:
            del parent.children[block_id]
        dropped = [block_id]
        for dropped_id in dropped:
            node = self._nodes.pop(dropped_id)
            del self._by_digest[node.key.digest]
            dropped.extend(node.children)
        return dropped

    def check_invariants(self) -> None:
        """Assert that index and nodes agree one to one, and that parents and children agree."""
        assert len(self._by_digest) == len(self._nodes), "the digest index and the nodes differ in size"
        for digest, block_id in self._by_digest.items():
            assert self._nodes[block_id].key.digest == digest, f"wrong digest for block {block_id}"
        num_children = 0
        for block_id, node in self._nodes.items():
            num_children += len(node.children)
            if node.parent_id != ROOT:
                assert node.parent_id in self._nodes, f"the parent of block {block_id} is not registered"
                assert block_id in self._nodes[node.parent_id].children, f"block {block_id} is no child"
        num_below_root = sum(node.parent_id != ROOT for node in self._nodes.values())
        assert num_children == num_below_root, "some children have no node"
