"""Block ids and their reference counts: which blocks are free, cached or in use."""

from collections import OrderedDict
from collections.abc import Container, Iterable

from octavo.errors import InvalidArgumentError


class BlockPool:
    """N blocks, each in exactly one of three places.

        free (never hashed, reused first)     cached (ref 0, can be hit, LRU)     referenced (ref > 0)

    Cached blocks that someone asked to keep are evicted after the others; beyond `max_kept` of them, the
    least recently used one becomes like the others. Cold ones are evicted before the others. Every operation
    is O(1) per block. The caller of `release` decides whether a block is cached.

    Args:
        num_blocks: N.
        max_kept: most cached blocks that are evicted last.

    Attributes:
        num_blocks: N.
        ref_counts: [N], how many block tables hold each block.
        num_shared: blocks with a reference count above 1.
        to_keep: blocks that are evicted last, now or once they are cached.
    """

    def __init__(self, num_blocks: int, max_kept: int = 0) -> None:
        self.num_blocks = num_blocks
        self.max_kept = max_kept
        self.ref_counts = [0] * num_blocks
        self.num_shared = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        # The other cached blocks, which are evicted first and last.
        self._cold: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()
        self.to_keep: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks whose contents cannot be hit."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without a reference whose contents can still be hit."""
        return len(self._cold) + len(self._cached) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Cached blocks that are evicted last."""
        return len(self._kept)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + self.num_cached

    @property
    def free_ids(self) -> list[int]:
        """Ids of the free blocks, next one last."""
        return list(self._free)

    @property
    def cached_ids(self) -> list[int]:
        """Ids of the cached blocks, in the order of eviction."""
        return [*self._cold, *self._cached, *self._kept]

    def states(self, step: int, end: int | None = None) -> list[int]:
        """Return [ceil(end / step)] reference counts of blocks 0, step, 2 step, ...; -1 for free ones.

        Args:
            step: look at one block of so many.
            end: look at the blocks before it; None for all N.
        """
        end = self.num_blocks if end is None else end
        return [
            count or (0 if self._is_cached(block_id) else -1)
            for block_id, count in zip(range(0, end, step), self.ref_counts[:end:step], strict=True)
        ]

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Hand out blocks with reference count 1: free ones first, then cached ones in their order.

        Returns:
            The block ids, or None when there are too few; then nothing changed.
        """
        if num_blocks > self.num_available:
            return None
        free = self._free
        block_ids = [free.pop() if free else self._pop_cached() for _ in range(num_blocks)]
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
        return block_ids

    def keep(self, block_ids: Iterable[int]) -> None:
        """Evict these referenced blocks last once they are cached, until their contents are gone."""
        if self.max_kept:
            self.to_keep.update(block_ids)

    def retain(self, block_id: int) -> None:
        """Add a reference to a cached or referenced block.

        Raises:
            InvalidArgumentError: there is no such block, or it is free.
        """
        self._require_block(block_id)
        count = self.ref_counts[block_id]
        if count == 0:
            if not self._is_cached(block_id):
                raise InvalidArgumentError(f"block {block_id} is free; allocate it instead of retaining it")
            self._uncache(block_id)
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

    def release(self, block_id: int, *, cached: bool, cold: bool = False) -> None:
        """Remove a reference; with the last one, the block becomes cached or free.

        Args:
            block_id: a referenced block.
            cached: whether its contents can still be hit after the last reference is gone.
            cold: if it is cached then, it is evicted before others.

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
            self._cache(block_id, cold)
        elif count == 1:
            self.to_keep.discard(block_id)
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
        if not self._is_cached(block_id):
            raise InvalidArgumentError(f"block {block_id} is not cached; only cached blocks can be dropped")
        self._uncache(block_id)
        self.to_keep.discard(block_id)
        self._free.append(block_id)

    def _is_cached(self, block_id: int) -> bool:
        return block_id in self._cached or block_id in self._kept or block_id in self._cold

    def _cache(self, block_id: int, cold: bool) -> None:
        if cold:
            self.to_keep.discard(block_id)
            self._cold[block_id] = None
            return
        if block_id not in self.to_keep:
            self._cached[block_id] = None
            return
        self._kept[block_id] = None
        if len(self._kept) > self.max_kept:
            oldest, _ = self._kept.popitem(last=False)
            self.to_keep.discard(oldest)
            self._cached[oldest] = None

    def _uncache(self, block_id: int) -> None:
        if self._cold and block_id in self._cold:
            del self._cold[block_id]
        else:
            del (self._kept if block_id in self._kept else self._cached)[block_id]

    def _pop_cached(self) -> int:
        block_id, _ = (self._cold or self._cached or self._kept).popitem(last=False)
        self.to_keep.discard(block_id)
        return block_id

    def _require_block(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise InvalidArgumentError(f"block ids are 0 .. {self.num_blocks - 1}, got {block_id}")
