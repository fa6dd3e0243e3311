"""Block ids and their reference counts: which blocks are free, cached or in use."""

from collections import OrderedDict
from collections.abc import Container, Iterable

from octavo.errors import InvalidArgumentError


class BlockPool:
    """N blocks, each in exactly one of three places.

        free (never hashed, reused first)     cached (ref 0, can be hit, LRU)     referenced (ref > 0)

    Every operation is O(1) per block. The caller of `release` decides whether a block is cached.

    Attributes:
        num_blocks: N.
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
        """Blocks whose contents cannot be hit."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without a reference whose contents can still be hit."""
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

    def states(self, step: int, end: int | None = None) -> list[int]:
        """Return [ceil(end / step)] reference counts of blocks 0, step, 2 step, ...; -1 for free ones.

        Args:
            step: look at one block of so many.
            end: look at the blocks before it; None for all N.
        """
        cached = self._cached
        end = self.num_blocks if end is None else end
        return [
            count or (0 if block_id in cached else -1)
            for block_id, count in zip(range(0, end, step), self.ref_counts[:end:step], strict=True)
        ]

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Hand out blocks with reference count 1: free ones first, then the least recently used cached ones.

        Returns:
            The block ids, or None when there are too few; then nothing changed.
        """
        if num_blocks > self.num_available:
            return None
        free, cached = self._free, self._cached
        block_ids = [free.pop() if free else cached.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
        return block_ids

    def retain(self, block_id: int) -> None:
        """Add a reference to a cached or referenced block.

        Raises:
            InvalidArgumentError: there is no such block, or it is free.
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
        """Retain each block, as `retain` does; fast if most blocks are shared already.

        After an error, the blocks before the bad one are retained.
        """
        counts, num_blocks = self.ref_counts, self.num_blocks
        for block_id in block_ids:
            if 0 <= block_id < num_blocks and counts[block_id] > 1:
                counts[block_id] += 1
            else:
                self.retain(block_id)

    def release(self, block_id: int, *, cached: bool) -> None:
        """Remove a reference; with the last one, the block becomes cached or free.

        Args:
            block_id: a referenced block.
            cached: whether its contents can still be hit after the last reference is gone.

        Raises:
            InvalidArgumentError: there is no such block, or it has no reference.
        """
        self._require_block(block_id)
        count = self.ref_counts[block_id]
        if count == 0:
            raise InvalidArgumentError(f"block {block_id} has no reference to release; was it freed twice?")
        self.ref_counts[block_id] = count - 1
        self.num_shared -= count == 2
        if count == 1 and cached:
            self._cached[block_id] = None
        elif count == 1:
            self._free.append(block_id)

    def release_all(self, block_ids: Iterable[int], *, cached: Container[int]) -> None:
        """Release each block, as `release` does; fast if most blocks stay shared.

        `cached` holds the blocks to cache. After an error, the blocks before the bad one are released.
        """
        counts, num_blocks = self.ref_counts, self.num_blocks
        for block_id in block_ids:
            if 0 <= block_id < num_blocks and counts[block_id] > 2:
                counts[block_id] -= 1
            else:
                self.release(block_id, cached=block_id in cached)

    def uncache(self, block_id: int) -> None:
        """Move a cached block to the free ones; InvalidArgumentError if it is not cached."""
        self._require_block(block_id)
        if block_id not in self._cached:
            raise InvalidArgumentError(f"block {block_id} is not cached; only cached blocks can be dropped")
        del self._cached[block_id]
        self._free.append(block_id)

    def _require_block(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise InvalidArgumentError(f"block ids are 0 .. {self.num_blocks - 1}, got {block_id}")
