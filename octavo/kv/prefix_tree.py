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
        num_hits: lookups that ended at this block, or at a block below it that was dropped since.
    """

    key: BlockKey
    parent_id: int
    children: dict[int, None] = field(default_factory=dict)
    num_hits: int = 0


class PrefixTree:
    """Registered blocks, found by chained digest, verified by parent and contents.

        ROOT --- [you are] --- [a helpful] --- [assistant]
                     |-------- [a pirate.]

    The digest only speeds the search up. A hit also needs equal contents and the very parent the search
    came from, so by induction the whole prefix (and the salt) is equal even if every digest collides.

    A registered block's parent is always registered: dropping a block drops everything below it. Sequences
    release their tails first, so the least recently used block is nearly always a leaf.

    Attributes:
        nodes: by block id, for observers.
        first_blocks: block ids of the nodes below ROOT, oldest first.
    """

    def __init__(self) -> None:
        self.nodes: dict[int, PrefixNode] = {}
        self.first_blocks: dict[int, None] = {}
        self._by_digest: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self.nodes)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self.nodes

    def has_digest(self, digest: bytes) -> bool:
        """Return whether a block with this digest is registered; from any thread."""
        return digest in self._by_digest

    def find(self, parent_id: int, key: BlockKey) -> int | None:
        """Return the block that continues `parent_id` (a block id or ROOT) with `key`, or None."""
        block_id = self._by_digest.get(key.digest)
        if block_id is None:
            return None
        node = self.nodes[block_id]
        return block_id if node.parent_id == parent_id and node.key.content == key.content else None

    def longest_match(self, keys: Iterable[BlockKey], known: Sequence[int] = ()) -> list[int]:
        """Return the longest run of registered blocks that equals the first of `keys`.

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
        assert block_id not in self.nodes, f"block {block_id} is already registered"
        self.nodes[block_id] = PrefixNode(key, parent_id)
        self._by_digest[key.digest] = block_id
        siblings = self.first_blocks if parent_id == ROOT else self.nodes[parent_id].children
        siblings[block_id] = None
        return block_id

    def note_hit(self, block_id: int) -> None:
        """Count a lookup that found the blocks up to this one, and no more."""
        self.nodes[block_id].num_hits += 1

    def remove(self, block_id: int) -> list[int]:
        """Drop a block and everything below it; the block above keeps their hits.

        Returns:
            The dropped block ids, `block_id` first.
        """
        parent = self.nodes.get(self.nodes[block_id].parent_id)
        del (self.first_blocks if parent is None else parent.children)[block_id]
        dropped, num_hits = [block_id], 0
        for dropped_id in dropped:
            node = self.nodes.pop(dropped_id)
            del self._by_digest[node.key.digest]
            num_hits += node.num_hits
            dropped.extend(node.children)
        if parent is not None:
            parent.num_hits += num_hits
        return dropped

    def check_invariants(self) -> None:
        """Assert that index and nodes agree one to one, and that parents and children agree."""
        assert len(self._by_digest) == len(self.nodes), "the digest index and the nodes differ in size"
        for digest, block_id in self._by_digest.items():
            assert self.nodes[block_id].key.digest == digest, f"wrong digest for block {block_id}"
        num_children = len(self.first_blocks)
        for block_id, node in self.nodes.items():
            num_children += len(node.children)
            if node.parent_id == ROOT:
                assert block_id in self.first_blocks, f"first block {block_id} is not listed"
            else:
                assert node.parent_id in self.nodes, f"the parent of block {block_id} is not registered"
                assert block_id in self.nodes[node.parent_id].children, f"block {block_id} is no child"
        assert num_children == len(self.nodes), "some children have no node"
