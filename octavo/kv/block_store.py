"""Page pool and registry, kept in step: an unreferenced page is cached while something in it can be hit.

In a cache of one group a page is a block. With several groups (cache_layout.py), a page holds blocks of one
of them.
"""

from collections import Counter
from collections.abc import Sequence

from octavo.kv.block_pool import BlockPool
from octavo.kv.cache_layout import CacheLayout
from octavo.kv.prefix_tree import ROOT
from octavo.kv.registry import Registry
from octavo.kv.sequence_blocks import GONE, SequenceBlocks, WindowBlocks
from octavo.kv.slots import num_blocks_for


class BlockStore:
    """Hands out, shares, registers and evicts blocks.

    Attributes:
        layout: groups and pages.
        pool: reference counts of pages: a sequence counts once.
        registry: what can be hit.
        tree: the first group's blocks of that.
        num_evictions: registered pages lost to allocations so far.
    """

    def __init__(
        self, num_blocks: int, layout: CacheLayout, *, num_evictions: int = 0, max_kept: int = 0
    ) -> None:
        self.layout = layout
        self.pool = BlockPool(num_blocks, max_kept)
        self.registry = Registry(layout, num_blocks)
        self.tree = self.registry.tree
        self.num_evictions = num_evictions
        self._per_page = layout.groups[0].blocks_per_page
        # In which groups a block's id is its page.
        self._is_plain = [group.is_plain for group in layout.groups]
        # The sequence that was matched last.
        self._newest: SequenceBlocks | None = None

    def page(self, block_id: int, group: int = 0) -> int:
        """Return the page that a block is in."""
        return self.layout.groups[group].page(block_id, self.pool.num_blocks)

    def pages(self, block_ids: Sequence[int], group: int = 0) -> Sequence[int]:
        """Return the pages of blocks, each once."""
        if self._is_plain[group]:
            return block_ids
        return self.layout.groups[group].pages(block_ids, self.pool.num_blocks)

    def held_pages(self, sequence: SequenceBlocks) -> Sequence[int]:
        """Return the pages that a sequence has, first group first, each group from its beginning."""
        pages = self.pages(sequence.block_ids)
        if not sequence.windows:
            return pages
        others = (self.pages(window.held, group) for group, window in enumerate(sequence.windows, start=1))
        return [*pages, *(page for held in others for page in held)]

    def num_held_pages(self, sequence: SequenceBlocks) -> int:
        """Return how many pages a sequence has."""
        block_ids = sequence.block_ids
        num_pages = len(block_ids if self._per_page == 1 else self.pages(block_ids))
        for window in sequence.windows:
            num_pages += len(window.block_ids) - window.num_gone
        return num_pages

    def take(self, num_pages: int) -> list[int] | None:
        """Hand out pages for writing, evicting cached ones as needed; None changes nothing."""
        pages, registered = self.pool.allocate(num_pages), self.registry.pages
        for page in pages or ():
            if page in registered:
                self.num_evictions += self._unregister(page)
        return pages

    def block_ids(self, pages: Sequence[int], group: int = 0) -> Sequence[int]:
        """Return the ids of all blocks of pages."""
        if self._is_plain[group]:
            return pages
        kind, num_pages = self.layout.groups[group], self.pool.num_blocks
        return [block_id for page in pages for block_id in kind.block_ids(page, num_pages)]

    def release(self, pages: Sequence[int]) -> None:
        """Remove a reference from each page, last page first: beginnings of prefixes are evicted last."""
        self.pool.release_all(reversed(pages), cached=self.registry.pages)

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
            own.block_ids = shared = block_ids[:num_full]
            if isinstance(own, WindowBlocks):
                own.num_gone = min(parent.windows[group - 1].num_gone, num_full)
                shared = own.held
            self.pool.retain_all(self.pages(shared, group))
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
        if num_in_tail == 0 or num_full >= sequence.num_filled_tokens // sequence.block_size:
            return True
        others = enumerate((window.block_ids[num_full] for window in sequence.windows), start=1)
        pages = [self.page(block_id, group) for group, block_id in others]
        are_alone = all(self.pool.ref_counts[page] == 1 and page not in self.registry.pages for page in pages)
        block_id = sequence.block_ids[num_full]
        # A block that others read, yet cannot be hit, may be in a page of several.
        return are_alone and self.pool.ref_counts[self.page(block_id)] == 1 and block_id not in self.tree

    def hide(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        """Give back the blocks of windows that no token behind the first `num_tokens` can see.

        They are evicted before others, unless a sequence needs them that continues one of `branches`.
        """
        for group, window in enumerate(sequence.windows, start=1):
            first = min(window.first_kept(num_tokens, sequence.block_size), len(window.block_ids))
            if first > window.num_gone:
                self._give_back(sequence, group, window, first)

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
        num_known = num_visible = len(block_ids)
        if sequence.windows:
            end = num_visible = self._num_visible(sequence, block_ids, num_known)
            misfits = self._misfits(block_ids[:end], len(token_ids))
            while end in misfits:
                end = self._num_visible(sequence, block_ids, end - 1)
            del block_ids[end:]
        self.pool.retain_all(self.pages(block_ids))
        if block_ids:
            self.tree.note_hit(block_ids[-1])
        sequence.block_ids = block_ids
        sequence.num_filled_tokens = len(block_ids) * sequence.block_size
        sequence.num_committed = len(block_ids)
        if sequence.windows:
            sequence.branches = (len(block_ids), num_known, len(token_ids) // sequence.block_size)
            for group, window in enumerate(sequence.windows, start=1):
                self._attach(sequence, group, window)
        self._newest = sequence
        return num_known - num_visible

    def register(
        self, sequence: SequenceBlocks, token_ids: Sequence[int], num_full: int, *, exchange: bool
    ) -> bool:
        """Register a sequence's blocks up to `num_full`, which are full.

        Where an equal block is registered already, the sequence takes that one and releases its own, or with
        `exchange` off stops there. Stops before a block whose digest collides with a different block's, and
        before one that is in yet another page, if the sequence might not fit the pool with it.

        Returns:
            True when the sequence's block ids changed (and are another list).

        Raises:
            InvalidArgumentError: the tokens differ from those that the sequence's keys were made of.
        """
        sequence.require_unchanged(token_ids, sequence.num_committed, num_full)
        sequence.extend_keys(token_ids, num_full)
        block_ids, first = sequence.block_ids, sequence.num_committed
        held, unknown, changed = None, None, False
        if sequence.windows:
            unknown = self.registry.unknown(block_ids[first:num_full])
            held = self._scarce_pages(block_ids, len(token_ids)) if exchange else None
        found: list[int] = []
        parent_id = block_ids[first - 1] if first else ROOT
        for index in range(first, num_full):
            own_id = block_ids[index]
            block_id = self.tree.find_or_insert(own_id, parent_id, sequence.block_keys[index])
            if block_id is None:
                break
            if block_id != own_id:
                if not exchange or (held is not None and not self._swap(held, own_id, block_id)):
                    break
                changed = True
            found.append(block_id)
            parent_id = block_id
        if changed:
            sequence.block_ids = self._exchange(block_ids, first, found, 0)
        if unknown is not None:
            self.registry.count(unknown)
            self._hang(sequence, first, found, exchange=exchange)
        sequence.num_committed = first + len(found)
        return changed

    def drop_cached(self) -> int:
        """Unregister every unreferenced page; returns how many became free."""
        num_free = self.pool.num_free
        for page in self.pool.cached_ids:
            if page in self.registry.pages:
                self._unregister(page)
        return self.pool.num_free - num_free

    def _give_back(self, sequence: SequenceBlocks, group: int, window: WindowBlocks, first: int) -> None:
        """Give back a window's blocks before `first`."""
        size, registered = sequence.block_size, self.registry.pages
        # Who continues a branch may have to compute a token of its last block.
        warm = [(window.first_kept((end - 1) * size, size), end) for end in sequence.branches]
        for index in range(window.num_gone, first):
            page = self.page(window.block_ids[index], group)
            is_warm = any(begin <= index < end for begin, end in warm)
            if is_warm and sequence.is_kept:
                self.pool.keep([page])
            self.pool.release(page, cached=page in registered, cold=not is_warm)
            window.block_ids[index] = GONE
        window.num_gone = first

    def _num_visible(self, sequence: SequenceBlocks, block_ids: Sequence[int], end: int) -> int:
        """Return how many leading blocks, at most `end`, can be continued.

        All groups have what the next token sees.
        """
        size = sequence.block_size
        while end > 0:
            gaps = (
                index
                for hanging, window in zip(self.registry.hanging, sequence.windows, strict=True)
                for index in range(window.first_seen(end * size, size), end)
                if block_ids[index] not in hanging
            )
            gap = next(gaps, None)
            if gap is None:
                break
            # All ends behind the gap need that block as well.
            end = gap
        return end

    def _attach(self, sequence: SequenceBlocks, group: int, window: WindowBlocks) -> None:
        """Give a sequence the blocks of another group that the tokens behind its prefix see."""
        block_ids, size, hanging = sequence.block_ids, sequence.block_size, self.registry.hanging[group - 1]
        first = window.first_seen(len(block_ids) * size, size)
        seen = [hanging[block_id] for block_id in block_ids[first:]]
        self.pool.retain_all(self.pages(seen, group))
        window.block_ids = [GONE] * first + seen
        window.num_gone = first

    def _hang(self, sequence: SequenceBlocks, first: int, node_ids: list[int], *, exchange: bool) -> None:
        """Hang a sequence's blocks of other groups on nodes, or take those that hang there."""
        for group, window in enumerate(sequence.windows, start=1):
            start, end = max(first, window.num_gone), first + len(node_ids)
            own_ids = window.block_ids[start:end]
            found = self.registry.hang(group, node_ids[start - first :], own_ids)
            if exchange and found != own_ids:
                window.block_ids = self._exchange(window.block_ids, start, found, group)

    def _exchange(self, block_ids: list[int], first: int, found: list[int], group: int) -> list[int]:
        """Return a new list with equal blocks in the place of a sequence's own, from `first` on."""
        changed = block_ids.copy()
        changed[first : first + len(found)] = found
        # Blocks of a page are no further apart.
        reach = self.layout.groups[group].blocks_per_page - 1
        near = slice(max(0, first - reach), first + len(found) + reach)
        before, after = (dict.fromkeys(self.pages(ids[near], group)) for ids in (block_ids, changed))
        self.pool.retain_all(page for page in after if page not in before)
        self.release([page for page in before if page not in after])
        return changed

    def _most_pages(self, num_blocks: int, num_tokens: int) -> int:
        """Return in how many pages blocks may be, so that a sequence of so many tokens fits the pool."""
        num_others = self.layout.num_other_pages(num_tokens)
        num_more = max(0, num_blocks_for(num_tokens, self.layout.block_size) - num_blocks)
        return self.pool.num_blocks - num_others - num_blocks_for(num_more, self._per_page)

    def _misfits(self, block_ids: Sequence[int], num_tokens: int) -> set[int]:
        """Return where a sequence that will have so many tokens may not begin.

        Blocks of a prefix may be in more pages than necessary: in each, a few that are part of it.
        """
        if self._per_page == 1 or len(block_ids) <= self._most_pages(0, num_tokens):
            return set()
        pages, misfits = set[int](), set[int]()
        for end, block_id in enumerate(block_ids, start=1):
            pages.add(self.page(block_id))
            if len(pages) > self._most_pages(end, num_tokens):
                misfits.add(end)
        return misfits

    def _scarce_pages(self, block_ids: Sequence[int], num_tokens: int) -> "_ScarcePages | None":
        """Return a sequence's pages if it may not have them in any number."""
        most = self._most_pages(len(block_ids), num_tokens)
        if self._per_page == 1 or len(block_ids) <= most:
            return None
        return Counter(map(self.page, block_ids)), most

    def _swap(self, scarce: "_ScarcePages", own_id: int, block_id: int) -> bool:
        """Note that a block takes the place of a sequence's own; False: that would be a page too many."""
        held, most = scarce
        own_page, page = self.page(own_id), self.page(block_id)
        if page not in held and held[own_page] > 1 and len(held) >= most:
            return False
        held[page] += 1
        held[own_page] -= 1
        if held[own_page] == 0:
            del held[own_page]
        return True

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
        lost = self.registry.drop(page)
        for lost_page in lost:
            if self.pool.ref_counts[lost_page] == 0:
                self.pool.uncache(lost_page)
        return len(lost)


_ScarcePages = tuple[Counter[int], int]
