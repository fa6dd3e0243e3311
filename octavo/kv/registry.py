"""Which pages hold something that can be hit: the tree of the first group's blocks, and what hangs on it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from octavo.kv.cache_layout import CacheLayout
from octavo.kv.prefix_tree import PrefixTree


class Registry:
    """The tree knows the first group's blocks. A block with the same tokens in another group hangs on the
    same node, by the node's block id, and may be dropped by itself.

    Attributes:
        tree: the first group's blocks that can be hit.
        hanging: for each group behind the first one, its blocks by node.
        pages: those that hold something that can be hit.
        drop: lets nothing in a page be hit any more, nor what continues it; returns the pages that hold
            nothing any more that can be hit.
    """

    def __init__(self, layout: CacheLayout, num_pages: int) -> None:
        self.tree = PrefixTree()
        self.hanging: list[dict[int, int]] = [{} for _ in layout.windows]
        self._layout = layout
        self._num_pages = num_pages
        # How many blocks of a page can be hit; and on which node, for which group, a page's block hangs.
        self._counts: dict[int, int] = {}
        self._places: dict[int, tuple[int, int]] = {}
        # With one block a page, what the tree knows is all.
        self._is_plain = layout.is_plain
        self.pages: Collection[int] = self.tree.nodes if self._is_plain else self._counts
        self.drop: Callable[[int], list[int]] = self.tree.remove if self._is_plain else self._drop

    def unknown(self, block_ids: Sequence[int]) -> list[int]:
        """Return those of the first group's blocks that `count` has to be told of, once the tree has them."""
        return [block_id for block_id in block_ids if block_id not in self.tree.nodes]

    def count(self, block_ids: Iterable[int]) -> None:
        """Note which of these blocks are in the tree now."""
        for block_id in block_ids:
            if block_id in self.tree.nodes:
                page = self._page(block_id, 0)
                self._counts[page] = self._counts.get(page, 0) + 1

    def hang(self, group: int, node_ids: Sequence[int], own_ids: Sequence[int]) -> list[int]:
        """Hang blocks of a group on nodes, where none hangs yet; return those that hang there now."""
        hanging, found = self.hanging[group - 1], []
        for node_id, own_id in zip(node_ids, own_ids, strict=True):
            block_id = hanging.setdefault(node_id, own_id)
            if block_id == own_id:
                page = self._page(own_id, group)
                self._places[page] = (node_id, group)
                self._counts[page] = 1
            found.append(block_id)
        return found

    def check_invariants(self) -> None:
        """Assert that pages are counted as often as something in them can be hit."""
        found: dict[int, int] = {}
        for block_id in self.tree.nodes:
            page = self._page(block_id, 0)
            found[page] = found.get(page, 0) + 1
        hanging = {}
        for group, blocks in enumerate(self.hanging, start=1):
            assert blocks.keys() <= self.tree.nodes.keys(), "a block hangs on a node that is gone"
            hanging |= {self._page(block_id, group): (node_id, group) for node_id, block_id in blocks.items()}
        assert not found.keys() & hanging.keys(), "a page belongs to two groups"
        assert self._places == hanging, "blocks of windows hang elsewhere than is noted"
        assert self._is_plain or self._counts == found | dict.fromkeys(hanging, 1), "counts are wrong"

    def _drop(self, page: int) -> list[int]:
        if page in self._places:
            node_id, group = self._places.pop(page)
            del self.hanging[group - 1][node_id], self._counts[page]
            return [page]
        block_ids = self._layout.groups[0].block_ids(page, self._num_pages)
        known = (block_id for block_id in block_ids if block_id in self.tree.nodes)
        dropped = (node_id for block_id in known for node_id in self.tree.remove(block_id))
        return [lost for node_id in dropped for lost in self._forget(node_id)]

    def _forget(self, node_id: int) -> Iterator[int]:
        """Forget a dropped node; yield the pages that hold nothing any more that can be hit."""
        page = self._page(node_id, 0)
        self._counts[page] -= 1
        if self._counts[page] == 0:
            del self._counts[page]
            yield page
        for group, hanging in enumerate(self.hanging, start=1):
            block_id = hanging.pop(node_id, None)
            if block_id is not None:
                page = self._page(block_id, group)
                del self._places[page], self._counts[page]
                yield page

    def _page(self, block_id: int, group: int) -> int:
        return self._layout.groups[group].page(block_id, self._num_pages)
