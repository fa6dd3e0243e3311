"""Page pool and prefix tree in step: an unreferenced page is cached while something in it can be hit.

In a cache of one group, a page is a block. With several groups (cache_layout.py) a page holds blocks of one of
them. The tree knows the first group's blocks; the block with the same tokens in another group hangs on the
same node, and may be evicted by itself.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set

from octavo.kv.block_pool import BlockPool
from octavo.kv.cache_layout import CacheLayout
from octavo.kv.prefix_tree import ROOT, PrefixNode, PrefixTree
from octavo.kv.sequence_blocks import GONE, SequenceBlocks, WindowBlocks


class BlockStore:
    """Hands out, shares, registers and evicts blocks.

    Attributes:
        layout: groups and pages.
        pool: reference counts of pages: a sequence counts once.
        tree: the first group's blocks that can be hit.
        num_evictions: registered pages lost to allocations so far.
    """

    def __init__(
        self, num_blocks: int, layout: CacheLayout, *, num_evictions: int = 0, max_kept: int = 0
    ) -> None:
        self.layout = layout
        self.pool = BlockPool(num_blocks, max_kept)
        self.tree = PrefixTree()
        self.num_evictions = num_evictions
        # How many blocks of each page can be hit; and on which node, and for which group, others' hang.
        self._registered = Counter[int]()
        self._nodes: dict[int, tuple[int, int]] = {}
        # The sequence that was matched last.
        self._newest: SequenceBlocks | None = None

    def page(self, block_id: int, group: int = 0) -> int:
        """Return the page that a block is in."""
        return self.layout.groups[group].page(block_id, self.pool.num_blocks)

    def pages(self, block_ids: Iterable[int], group: int = 0) -> list[int]:
        """Return the pages of blocks, each once."""
        kind = self.layout.groups[group]
        if kind.blocks_per_page == kind.layers_per_slice == 1:
            return list(block_ids)
        return list(dict.fromkeys(self.page(block_id, group) for block_id in block_ids))

    def held_pages(self, sequence: SequenceBlocks) -> list[int]:
        """Return the pages that a sequence has, first group first, each group from its beginning."""
        pages = self.pages(sequence.block_ids)
        for group, window in enumerate(sequence.windows, start=1):
            pages += self.pages(window.held, group)
        return pages

    def take(self, num_pages: int) -> list[int] | None:
        """Hand out pages for writing, evicting cached ones as needed; None changes nothing."""
        pages = self.pool.allocate(num_pages)
        for page in pages or ():
            if page in self._registered:
                self.num_evictions += self._unregister(page)
        return pages

    def block_ids(self, pages: Iterable[int], group: int = 0) -> list[int]:
        """Return the ids of all blocks of pages."""
        kind, num_pages = self.layout.groups[group], self.pool.num_blocks
        return [block_id for page in pages for block_id in kind.block_ids(page, num_pages)]

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to each page."""
        self.pool.retain_all(pages)

    def release(self, pages: Sequence[int]) -> None:
        """Remove a reference from each page, last page first: beginnings of prefixes are evicted last."""
        self.pool.release_all(reversed(pages), cached=self._registered)

    def cut(self, sequence: SequenceBlocks, num_blocks: int) -> None:
        """Give back what a sequence has behind its first blocks; its lists become others."""
        kept = set(self.pages(sequence.block_ids[max(0, num_blocks - self._per_page) : num_blocks]))
        self.release([page for page in self.pages(sequence.block_ids[num_blocks:]) if page not in kept])
        sequence.block_ids = sequence.block_ids[:num_blocks]
        for group, window in enumerate(sequence.windows, start=1):
            self.release(self.pages(window.block_ids[max(window.num_gone, num_blocks) :], group))
            window.block_ids = window.block_ids[:num_blocks]

    def branch(
        self, parent: SequenceBlocks, child: SequenceBlocks, num_full: int, tails: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Give an empty child its parent's full blocks, and pages for copies of what follows, if there are.

        Returns:
            Copies to make: a page of the parent's and one of `tails` for each group.
        """
        copies = []
        lists = [(parent.block_ids, child)] + [
            (window.block_ids, own) for window, own in zip(parent.windows, child.windows, strict=True)
        ]
        for group, (block_ids, own) in enumerate(lists):
            own.block_ids = block_ids[:num_full]
            if isinstance(own, WindowBlocks):
                own.num_gone = min(parent.windows[group - 1].num_gone, num_full)
            self.retain(self.pages([block_id for block_id in own.block_ids if block_id != GONE], group))
            if tails:
                page, ids = (
                    self.page(block_ids[num_full], group),
                    self.block_ids(tails[group : group + 1], group),
                )
                # A copy of a page has the same block at the same place.
                own.block_ids += ids[self.block_ids([page], group).index(block_ids[num_full]) :]
                copies.append((page, tails[group]))
        return copies

    def can_cut(self, sequence: SequenceBlocks, num_tokens: int) -> bool:
        """Return whether a cut at `num_tokens` leaves only blocks that the sequence may write again."""
        num_full, num_in_tail = divmod(num_tokens, sequence.block_size)
        if num_in_tail == 0:
            return True
        pages = [
            self.page(window.block_ids[num_full], group)
            for group, window in enumerate(sequence.windows, start=1)
            if num_full < len(window.block_ids)
        ]
        are_alone = all(self.pool.ref_counts[page] == 1 and page not in self._registered for page in pages)
        return are_alone and self.is_writable(sequence.block_ids[num_full])

    def hide(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Give back the blocks of windows that no token behind the first `num_tokens` can see.

        They are evicted before others, unless a sequence needs them that continues one of `branches`.
        """
        size = sequence.block_size
        for group, window in enumerate(sequence.windows, start=1):
            first = min(window.first_seen(num_tokens, size), len(window.block_ids))
            ends = [(window.first_seen(end * size, size), end) for end in sequence.branches]
            for index in range(window.num_gone, first):
                page = self.page(window.block_ids[index], group)
                is_cold = not any(begin <= index < end for begin, end in ends)
                self.pool.release(page, cached=page in self._registered, cold=is_cold)
                window.block_ids[index] = GONE
            window.num_gone = max(first, window.num_gone)

    def match(self, sequence: SequenceBlocks, token_ids: Sequence[int], num_blocks: int) -> int:
        """Attach to an empty sequence the longest run of registered blocks that equals its tokens.

        Args:
            sequence: an empty sequence.
            token_ids: its tokens.
            num_blocks: attach at most this many.

        Returns:
            Blocks that the first group had besides, but other groups had lost.

        Raises:
            InvalidArgumentError: the tokens differ from those that the sequence's keys were made of.
        """
        sequence.require_unchanged(token_ids, 0, num_blocks)
        known = self._known_blocks(sequence, token_ids, num_blocks)
        block_ids = self.tree.longest_match(sequence.keys(token_ids, len(known), num_blocks), known)
        num_known = len(block_ids)
        sequence.branches = (num_known, len(token_ids) // sequence.block_size)
        if sequence.windows:
            del block_ids[self._num_visible(sequence, block_ids) :]
        self.retain(self.pages(block_ids))
        if block_ids:
            self.tree.note_hit(block_ids[-1])
        sequence.block_ids = block_ids
        sequence.num_filled_tokens = len(block_ids) * sequence.block_size
        sequence.num_committed = len(block_ids)
        for group, window in enumerate(sequence.windows):
            self._attach(sequence, group, window)
        self._newest = sequence
        return num_known - len(block_ids)

    def register(
        self, sequence: SequenceBlocks, token_ids: Sequence[int], num_full: int, *, exchange: bool
    ) -> bool:
        """Register a sequence's blocks up to `num_full`, which are full.

        Where an equal block is registered already, the sequence takes that one and releases its own, or with
        `exchange` off stops there. Stops before a block whose digest collides with a different block's.

        Returns:
            True when the sequence's block ids changed (and are another list).

        Raises:
            InvalidArgumentError: the tokens differ from those that the sequence's keys were made of.
        """
        sequence.require_unchanged(token_ids, sequence.num_committed, num_full)
        sequence.extend_keys(token_ids, num_full)
        first, changed = sequence.num_committed, False
        for index in range(first, num_full):
            block_ids = sequence.block_ids
            parent_id = block_ids[index - 1] if index else ROOT
            own_id = block_ids[index]
            block_id = self.tree.find_or_insert(own_id, parent_id, sequence.block_keys[index])
            if block_id is None or (block_id != own_id and not exchange):
                break
            if block_id == own_id:
                self._registered[self.page(own_id)] += 1
            else:
                sequence.block_ids = self._exchange(block_ids, index, block_id, 0, is_first=not changed)
                changed = True
            for group, window in enumerate(sequence.windows):
                self._register_other(block_id, group, window, index, exchange=exchange)
            sequence.num_committed = index + 1
        return changed

    def is_writable(self, block_id: int) -> bool:
        """Return whether only one sequence writes the block and no other can find it.

        A page of several blocks is written by the sequence that took it; others read only registered ones.
        """
        is_alone = self._per_page > 1 or self.pool.ref_counts[self.page(block_id)] == 1
        return is_alone and block_id not in self.tree

    def drop_cached(self) -> int:
        """Unregister every unreferenced block; returns how many pages became free."""
        num_free = self.pool.num_free
        for page in self.pool.cached_ids:
            if page in self._registered:
                self._unregister(page)
        return self.pool.num_free - num_free

    @property
    def registered_pages(self) -> Set[int]:
        """The pages that hold something which can be hit."""
        return self._registered.keys()

    def check_invariants(self) -> None:
        """Assert that pages are counted as registered as often as something in them can be hit."""
        found = Counter(self.page(block_id) for block_id in self.tree.nodes)
        hanging = {}
        for node_id, node in self.tree.nodes.items():
            for group, block_id in node.windows.items():
                hanging[self.page(block_id, group + 1)] = (node_id, group)
        assert not found.keys() & hanging.keys(), "a page belongs to two groups"
        assert self._nodes == hanging, "blocks of windows hang elsewhere than the store believes"
        assert self._registered == found + Counter(hanging.keys()), "registrations are counted wrongly"

    @property
    def _per_page(self) -> int:
        return self.layout.groups[0].blocks_per_page

    def _num_visible(self, sequence: SequenceBlocks, block_ids: Sequence[int]) -> int:
        """Return how many leading blocks can be continued: all groups have what the next token sees."""
        nodes, size = self.tree.nodes, sequence.block_size
        # The end, and for each group how many blocks before it are there without a gap.
        best, runs = 0, [0] * len(sequence.windows)
        for end, block_id in enumerate(block_ids, start=1):
            others = nodes[block_id].windows
            for group in range(len(runs)):
                runs[group] = runs[group] + 1 if group in others else 0
            if all(
                end - run <= window.first_seen(end * size, size)
                for run, window in zip(runs, sequence.windows, strict=True)
            ):
                best = end
        return best

    def _attach(self, sequence: SequenceBlocks, group: int, window: WindowBlocks) -> None:
        """Give a sequence the blocks of another group that the tokens behind its prefix see."""
        block_ids, size = sequence.block_ids, sequence.block_size
        first = window.first_seen(len(block_ids) * size, size)
        seen = [self.tree.nodes[block_id].windows[group] for block_id in block_ids[first:]]
        self.retain(self.pages(seen, group + 1))
        window.block_ids = [GONE] * first + seen
        window.num_gone = first

    def _register_other(
        self, node_id: int, group: int, window: WindowBlocks, index: int, *, exchange: bool
    ) -> None:
        """Hang a sequence's block of another group on a node, or take the one that hangs there."""
        own_id = window.block_ids[index] if index < len(window.block_ids) else GONE
        if own_id == GONE:
            return
        others = self.tree.nodes[node_id].windows
        block_id = others.setdefault(group, own_id)
        page = self.page(own_id, group + 1)
        if block_id == own_id:
            if page not in self._nodes:
                self._nodes[page] = (node_id, group)
                self._registered[page] += 1
        elif exchange:
            window.block_ids = self._exchange(window.block_ids, index, block_id, group + 1, is_first=True)

    def _exchange(
        self, block_ids: list[int], index: int, block_id: int, group: int, *, is_first: bool
    ) -> list[int]:
        """Put an equal block in the place of a sequence's own; returns its list, a new one if `is_first`."""
        if is_first:
            block_ids = block_ids.copy()
        reach = self.layout.groups[group].blocks_per_page - 1
        near = slice(max(0, index - reach), index + reach + 1)
        before = set(self.pages(block_ids[near], group))
        block_ids[index] = block_id
        after = set(self.pages(block_ids[near], group))
        self.retain(after - before)
        self.release(list(before - after))
        return block_ids

    def _known_blocks(self, sequence: SequenceBlocks, token_ids: Sequence[int], num_blocks: int) -> list[int]:
        """Return the blocks that a sequence shares with the one matched last, and copy their keys.

        Prompts with a long common prefix often follow one another. Comparing their tokens is much faster than
        looking up every block.
        """
        newest = self._newest
        num_equal = 0 if newest is None else sequence.num_equal_blocks(token_ids, newest, num_blocks)
        # The blocks before a registered one are registered.
        if newest is None or num_equal == 0 or newest.block_ids[num_equal - 1] not in self.tree:
            return []
        if len(sequence.block_keys) < num_equal:
            sequence.block_keys = newest.block_keys[:num_equal]
        return newest.block_ids[:num_equal]

    def _unregister(self, page: int) -> int:
        """Let nothing in a page be hit any more, nor what continues it; returns how many pages were lost."""
        lost = set[int]()
        if page in self._nodes:
            node_id, group = self._nodes[page]
            del self.tree.nodes[node_id].windows[group]
            self._forget(page, lost)
        elif page in self._registered:
            for block_id in self.block_ids([page]):
                if block_id in self.tree:
                    self._drop(self.tree.remove(block_id), lost)
        return len(lost)

    def _drop(self, nodes: dict[int, PrefixNode], lost: set[int]) -> None:
        for block_id, node in nodes.items():
            self._forget(self.page(block_id), lost)
            for group, other_id in node.windows.items():
                self._forget(self.page(other_id, group + 1), lost)

    def _forget(self, page: int, lost: set[int]) -> None:
        """Count one registration of a page less; without any, and without a reference, it is free."""
        self._nodes.pop(page, None)
        self._registered[page] -= 1
        if self._registered[page] == 0:
            del self._registered[page]
            lost.add(page)
            if self.pool.ref_counts[page] == 0:
                self.pool.uncache(page)
