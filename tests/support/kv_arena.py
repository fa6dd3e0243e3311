"""The arena of a cache as cells by absolute address, for layouts of several groups."""

from collections.abc import Iterator, Sequence

from octavo.kv import CacheGroup, CacheLayer, CacheLayout, SequenceBlocks, plan_layout

Prefix = tuple[bytes, tuple[int, ...]]

MAX_TOKENS = 48

FULL, WIDE = CacheLayer(1, 1), CacheLayer(1, 2)


def window(num_tokens: int, head_dim: int = 1) -> CacheLayer:
    return CacheLayer(1, head_dim, num_tokens)


LAYERS: dict[str, Sequence[CacheLayer]] = {
    "ordinary": [FULL] * 2,
    "one window": [FULL, window(5)] * 2,
    "a window of one token": [window(1), FULL],
    "two windows": [FULL, window(3), window(7)],
    "3 blocks a page": [FULL, *[window(5)] * 3],
    "10 blocks a page": [FULL, *[window(6)] * 10],
    "heads of two sizes": [WIDE, WIDE, FULL],
    "2 layers a slice": [FULL, FULL, *[window(6, 2)] * 2],
    "2 layers a slice, 10 blocks a page": [FULL, FULL, *[window(5, 2)] * 10],
    "heads of two sizes and a window": [WIDE, WIDE, FULL, window(4), window(4), window(4)],
    "windows alone": [window(5)] * 2,
    "two windows alone": [window(3), window(6, 2)],
}


def layout_of(name: str, block_size: int) -> CacheLayout:
    return plan_layout(LAYERS[name], block_size, MAX_TOKENS)


def ids_of(blocks: SequenceBlocks) -> list[list[int]]:
    """Return a sequence's block ids in each group."""
    return [blocks.block_ids, *(window.block_ids for window in blocks.windows)]


class Arena:
    """Keys of all layers, [slices, pages, slice]; a cell is one number.

    Every layer writes its own, so that what one reads must have been written by the same one.
    """

    def __init__(self, layout: CacheLayout, num_pages: int) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.size = layout.num_slices * num_pages * layout.slice_size
        self.cells: dict[int, tuple[int, Prefix]] = {}

    def write(self, ids: Sequence[Sequence[int]], position: int, prefix: Prefix) -> None:
        """Write a token's numbers in all layers."""
        for group, block_ids in zip(self.layout.groups, ids, strict=True):
            for layer, cells in self._tokens(group, block_ids, position):
                self.cells.update(dict.fromkeys(cells, (layer, prefix)))

    def check(self, group: int, block_ids: Sequence[int], position: int, prefix: Prefix) -> None:
        """Assert that all layers of a group read what a token wrote."""
        for layer, cells in self._tokens(self.layout.groups[group], block_ids, position):
            assert all(self.cells[cell] == (layer, prefix) for cell in cells)

    def copy_page(self, source: int, destination: int) -> None:
        size = self.layout.slice_size
        for number in range(self.layout.num_slices):
            begins = [(number * self.num_pages + page) * size for page in (source, destination)]
            for offset in range(size):
                cell = self.cells.get(begins[0] + offset, (-1, (b"garbage", ())))
                self.cells[begins[1] + offset] = cell

    def _tokens(
        self, group: CacheGroup, block_ids: Sequence[int], position: int
    ) -> Iterator[tuple[int, range]]:
        index, offset = divmod(position, self.layout.block_size)
        for layer in group.layers:
            block = group.first_block(layer, self.num_pages) + block_ids[index]
            begin = (block * self.layout.block_size + offset) * group.kind.size
            assert block_ids[index] >= 0
            assert begin + group.kind.size <= self.size
            yield layer, range(begin, begin + group.kind.size)
