"""Block ids and their reference counts: which blocks are free, cached or in use."""

from collections import OrderedDict
from collections.abc import Container, Iterable

from octavo.errors import InvalidArgumentError


class BlockPool:
    """N blocks, each in exactly one of three places.

        free (never hashed, reused first)     cached (ref 0, still hit-able, LRU)     referenced (ref > 0)

    Every operation is O(1) per block. The pool does not know why a block is worth caching; whoever
    releases a block says whether it is.

    Attributes:
        num_blocks: N, blocks in all.
        ref_counts: [N], how many block tables hold each block.
        num_shared: blocks with a reference count above 1.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.num_shared = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks whose contents nobody can hit."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks nobody references whose contents can still be hit."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def free_ids(self) -> list[int]:
        """Ids of the free blocks, next one last."""
        return list(self._free)

    @property
    def cached_ids(self) -> list[int]:
        """Ids of the cached blocks, least recently used first."""
        return list(self._cached)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Hand out blocks with reference count 1: free ones first, then the least recently used cached ones.

        Returns:
            The block ids, or None when there are too few; then nothing changed.
        """
        if num_blocks > self.num_available:
            return None
        block_ids = [self._pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
        return block_ids

    def retain(self, block_id: int) -> None:
        """Add a reference to a cached or referenced block.

        Raises:
            InvalidArgumentError: no such block, or the block is free, so its contents mean nothing.
        """
        self._require_block(block_id)
        count = self.ref_counts[block_id]
        if count == 0:
            if block_id not in self._cached:
                raise InvalidArgumentError(f"block {block_id} is free; allocate it instead of retaining it")
            del self._cached[block_id]
        self.ref_counts[block_id] = count + 1
        self.num_shared += count == 1

    def retain_all(self, block_ids: Iterable[int]) -> None:
        """Retain each block; quickly, where most are shared already.

        Raises:
            InvalidArgumentError: as of `retain`; then the blocks before are retained.
        """
        counts, num_blocks = self.ref_counts, self.num_blocks
        for block_id in block_ids:
            if 0 <= block_id < num_blocks and counts[block_id] > 1:
                counts[block_id] += 1
            else:
                self.retain(block_id)

    def release(self, block_id: int, *, cached: bool) -> None:
        """Take a reference away; the last one moves the block to the cached (or free) blocks.

        Args:
            block_id: a referenced block.
            cached: keep the contents hit-able once nobody references the block.

        Raises:
            InvalidArgumentError: no such block, or it has no reference. Ids are never clamped or wrapped:
                that would free somebody else's block.
        """
        self._require_block(block_id)
        count = self.ref_counts[block_id]
        if count == 0:
            raise InvalidArgumentError(f"block {block_id} has no reference to release; was it freed twice?")
        self.ref_counts[block_id] = count - 1
        self.num_shared -= count == 2
        if count == 1:
            self._enqueue(block_id, cached)

    def release_all(self, block_ids: Iterable[int], *, cached: Container[int]) -> None:
        """Release each block; quickly, where most stay shared.

        Args:
            block_ids: referenced blocks.
            cached: the blocks whose contents stay hit-able once nobody references them.

        Raises:
            InvalidArgumentError: as of `release`; then the blocks before are released.
        """
        counts, num_blocks = self.ref_counts, self.num_blocks
        for block_id in block_ids:
            if 0 <= block_id < num_blocks and counts[block_id] > 2:
                counts[block_id] -= 1
            else:
                self.release(block_id, cached=block_id in cached)

    def uncache(self, block_id: int) -> None:
        """Move a cached block to the free ones.

        Raises:
            InvalidArgumentError: the block is not cached.
        """
        self._require_block(block_id)
        if block_id not in self._cached:
            raise InvalidArgumentError(f"block {block_id} is not cached; only cached blocks can be dropped")
        del self._cached[block_id]
        self._free.append(block_id)

    def _pop(self) -> int:
        return self._free.pop() if self._free else self._cached.popitem(last=False)[0]

    def _enqueue(self, block_id: int, cached: bool) -> None:
        if cached:
            self._cached[block_id] = None
        else:
            self._free.append(block_id)

    def _require_block(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise InvalidArgumentError(f"block ids are 0 .. {self.num_blocks - 1}, got {block_id}")
