"""How layers of several kinds share one arena: groups of layers, over pages of equal bytes.

Layers form a group where they keep the same: all keys, or a window of them, in heads of one shape. Each group
has block tables of its own, all groups take pages from one pool, and a page holds

    of windowed layers    one block of every layer of the group
    of full layers        as many blocks of every layer as fit, one after another

so that no group starves another. The arena is [2 (k, v), slices, pages, slice], and a page is one part of
each slice. Blocks of a group begin at multiples of their own size from where their layer begins: kernels see
a plain array of blocks, and read a group's ids from its table.

    slice 0   | page 0 | page 1 | page 2 |      windowed layers 0, 1, 2: slices 0, 1, 2 of a page
    slice 1   | page 0 | page 1 | page 2 |      full layer 0: three blocks, in slices 0, 1, 2 of a page
    slice 2   | page 0 | page 1 | page 2 |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from octavo.errors import InvalidArgumentError
from octavo.kv.cache_layers import CacheLayer
from octavo.kv.slots import num_blocks_for

# Blocks without memory in a page: block tables hold ids of 32 bits, of all pages.
_MOST_IDS = 8192


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same, and where their blocks are in a page.

    Attributes:
        layers: indexes of the cache's layers; may be empty in the first group.
        kind: what each of them keeps.
        layers_per_slice: layers beside each other in a slice.
        blocks_per_page: blocks of each layer in a page.
    """

    layers: tuple[int, ...]
    kind: CacheLayer
    layers_per_slice: int
    blocks_per_page: int

    @property
    def is_plain(self) -> bool:
        """Whether a block's id is its page."""
        return self.blocks_per_page == self.layers_per_slice == 1

    def block_id(self, page: int, index: int, num_pages: int) -> int:
        """Return the id of a page's block number `index`, as the group's tables have it."""
        outer, inner = divmod(index, self.layers_per_slice)
        return (outer * num_pages + page) * self.layers_per_slice + inner

    def block_ids(self, page: int, num_pages: int) -> list[int]:
        """Return the ids of all of a page's blocks."""
        return [self.block_id(page, index, num_pages) for index in range(self.blocks_per_page)]

    def page(self, block_id: int, num_pages: int) -> int:
        """Return the page that a block is in."""
        return block_id // self.layers_per_slice % num_pages

    def pages(self, block_ids: Sequence[int], num_pages: int) -> Sequence[int]:
        """Return the pages that blocks are in, each once."""
        if self.is_plain:
            return block_ids
        width = self.layers_per_slice
        return list(dict.fromkeys([block_id // width % num_pages for block_id in block_ids]))

    def first_block(self, layer: int, num_pages: int) -> int:
        """Return where block 0 of a layer begins, in blocks from the beginning of the arena's keys."""
        at = self.layers.index(layer) * self.blocks_per_page
        outer, inner = divmod(at, self.layers_per_slice)
        return outer * num_pages * self.layers_per_slice + inner


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a cache's layers, and the size of a page.

    Attributes:
        layers: of the cache.
        block_size: tokens per block, in every group.
        groups: the first one keeps all keys (it may have no layers), and says which prefixes are known.
        num_slices: slices of the arena.
        slice_size: numbers that a page has in a slice of keys, and in one of values.
    """

    layers: tuple[CacheLayer, ...]
    block_size: int
    groups: tuple[CacheGroup, ...]
    num_slices: int
    slice_size: int

    @property
    def is_plain(self) -> bool:
        """Whether there is one group, and a block's id is its page."""
        return len(self.groups) == 1 and self.groups[0].is_plain

    @property
    def page_size(self) -> int:
        """Numbers of a page, keys and values."""
        return 2 * self.num_slices * self.slice_size

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows of the groups behind the first one."""
        return tuple(group.kind.window for group in self.groups[1:])

    @property
    def tokens_per_page(self) -> int:
        """Tokens of the first group in a page."""
        return self.groups[0].blocks_per_page * self.block_size

    @property
    def max_pages(self) -> int:
        """Pages whose blocks all have an id of 32 bits."""
        return min((2**31 - 1) // max(group.blocks_per_page, group.layers_per_slice) for group in self.groups)

    def group_of(self, layer: int) -> int:
        """Return the index of the group of a layer."""
        return next(index for index, group in enumerate(self.groups) if layer in group.layers)

    def num_pages(self, num_tokens: int) -> int:
        """Return how many pages a sequence by itself takes at most, computed block by block."""
        num_blocks = num_blocks_for(num_tokens, self.block_size)
        return num_blocks_for(num_blocks, self.groups[0].blocks_per_page) + self.num_other_pages(num_tokens)

    def num_other_pages(self, num_tokens: int) -> int:
        """Return how many of these pages the groups behind the first one take."""
        num_blocks = num_blocks_for(num_tokens, self.block_size)
        return sum(
            num_blocks if window is None else min(num_blocks, num_blocks_for(window, self.block_size) + 1)
            for window in self.windows
        )

    def num_tokens(self, num_pages: int) -> int:
        """Return how many tokens of one sequence fit: the most whose pages are no more than these."""
        low, high = 0, num_pages * self.groups[0].blocks_per_page
        while low < high:
            middle = (low + high + 1) // 2
            if self.num_pages(middle * self.block_size) <= num_pages:
                low = middle
            else:
                high = middle - 1
        return low * self.block_size


def plan_layout(layers: Sequence[CacheLayer], block_size: int, max_tokens: int) -> CacheLayout:
    """Group layers and lay their blocks out.

    Args:
        layers: of the cache.
        block_size: tokens per block.
        max_tokens: longest sequence; windows at least as long keep all keys.

    Raises:
        InvalidArgumentError: there is no layer, or block sizes of different heads have no small multiple.
    """
    if not layers:
        raise InvalidArgumentError("a cache needs at least one layer")
    kinds: dict[CacheLayer, list[int]] = {}
    for index, layer in enumerate(layers):
        window = None if layer.window is None or layer.window >= max_tokens else layer.window
        kinds.setdefault(CacheLayer(layer.num_kv_heads, layer.head_dim, window), []).append(index)
    full = max(
        (kind for kind in kinds if kind.window is None), key=lambda kind: len(kinds[kind]), default=None
    )
    slice_size = block_size * lcm(*(kind.size for kind in kinds))
    if slice_size > 64 * block_size * min(kind.size for kind in kinds):
        raise InvalidArgumentError(f"heads of these sizes cannot share a cache: {sorted(map(str, kinds))}")
    per_slice = {kind: slice_size // (block_size * kind.size) for kind in kinds}
    num_slices = max(num_blocks_for(len(kinds[kind]), per_slice[kind]) for kind in kinds)
    if full is None:
        # Ids of prefixes take no memory but a page or few for each sequence.
        kind = CacheLayer(layers[0].num_kv_heads, layers[0].head_dim)
        first = CacheGroup((), kind, 1, min(num_blocks_for(max_tokens, block_size), _MOST_IDS))
    else:
        fit = _blocks_that_fit(len(kinds[full]), per_slice[full], num_slices)
        first = CacheGroup(tuple(kinds[full]), full, per_slice[full], fit)
    others = (CacheGroup(tuple(kinds[kind]), kind, per_slice[kind], 1) for kind in kinds if kind != full)
    return CacheLayout(tuple(layers), block_size, (first, *others), num_slices, slice_size)


def _blocks_that_fit(num_layers: int, per_slice: int, num_slices: int) -> int:
    """Return the most blocks of each layer in a page that fill whole slices, or parts of one."""
    most = num_slices * per_slice // num_layers
    return next(number for number in range(most, 0, -1) if number % per_slice == 0 or per_slice % number == 0)
