"""A manager next to a model of the arena: every sequence must read back exactly its own tokens.

A cell holds what keys and values depend on: the salt and all tokens up to its position. Reading a block
that is right in its own tokens, but not in those before them, is therefore an error too.
"""

from collections import Counter
from collections.abc import Sequence

from kv_arena import Arena, ids_of, layout_of
from kv_helpers import Model, colliding_hash

from octavo.errors import InvalidArgumentError
from octavo.kv import BlockTables, KVCacheManager, SequenceBlocks, hash_block, num_blocks_for

MAX_SEQUENCES = 6


class CheckedManager:
    """A manager beside the model of its cells: the steps of all operations, each with its checks.

    Attributes:
        seen: how often something worth testing happened.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        caching: bool,
        colliding: bool,
        max_kept: int = 0,
        layers: str = "ordinary",
    ) -> None:
        self.seen: Counter[str] = Counter()
        self.colliding = colliding
        self.layout = layout_of(layers, block_size)
        self.manager = KVCacheManager(
            num_blocks,
            block_size,
            layout=self.layout,
            enable_prefix_caching=caching,
            max_kept_blocks=max_kept,
            hash_block=colliding_hash if colliding else hash_block,
        )
        self.size = block_size
        self.models: list[Model] = []
        self.arena = Arena(self.layout, num_blocks)
        widest = num_blocks * self.per_page
        self.tables = [BlockTables(MAX_SEQUENCES, widest) for _ in self.layout.groups]
        for _ in range(2):
            self.models.append(Model(self.manager.new_sequence(), b"", [0] * 8, self.free_row()))

    @property
    def per_page(self) -> int:
        return self.layout.groups[0].blocks_per_page

    # ---- what must hold after every step ----

    def check(self) -> None:
        """Assert that the bookkeeping agrees, all tokens read back, and the batch's rows follow."""
        self.seen["steps"] += 1
        self.manager.check_invariants()
        for model in self.models:
            self.check_contents(model)
            if self.seen["steps"] % 4 == 0:  # rows may be several operations behind
                self.check_rows(model)

    def check_rows(self, model: Model) -> None:
        for tables, block_ids in zip(self.tables, ids_of(model.blocks), strict=True):
            tables.update(model.row, block_ids)
            row = tables.rows([model.row], tables.length(model.row))[0].tolist()
            assert len(row) == len(block_ids)
            # Nobody reads a row where blocks are gone.
            assert all(found == want for found, want in zip(row, block_ids, strict=True) if want >= 0)

    def check_contents(self, model: Model) -> None:
        """Assert that all layers read what the next token sees, as it was written."""
        ids = ids_of(model.blocks)
        for position in range(model.written):
            prefix = model.prefix(position + 1)
            for group, kind in enumerate(self.layout.groups):
                if kind.kind.window is None or position > model.written - kind.kind.window:
                    self.arena.check(group, ids[group], position, prefix)
        assert model.blocks.num_filled_tokens == model.filled

    def finish_all(self) -> None:
        """Free everything: the pool must be full again."""
        self.seen["evictions"] += self.manager.stats().num_evictions
        for model in list(self.models):
            self.drop(model)
        self.manager.check_invariants()
        assert self.manager.num_free_blocks == self.manager.num_blocks
        self.manager.reset_prefix_cache()
        stats = self.manager.stats()
        assert stats.num_free == self.manager.num_blocks
        assert stats.reserved_unfilled_tokens == stats.num_shared == 0

    # ---- helpers ----

    def attach(self, model: Model) -> None:
        max_tokens = len(model.tokens) - 1
        before = self.manager.stats()
        num_tokens = self.manager.match_prefix(model.blocks, model.tokens, max_tokens)
        assert num_tokens % self.size == 0
        assert num_tokens <= max(0, max_tokens)
        assert self.colliding or num_tokens >= self.num_committed_elsewhere(model, max_tokens)
        self.seen["hit"] += num_tokens > 0
        self.seen["hit of a window"] += num_tokens > 0 and len(self.layout.groups) > 1
        num_lost = self.manager.stats().prefix_lost_tokens - before.prefix_lost_tokens
        assert num_lost == 0 or (num_lost % self.size == 0 and model.blocks.windows)
        self.seen["window lost"] += num_lost > 0
        self.seen["hit before a lost window"] += num_lost > 0 and num_tokens > 0
        model.written = model.seen_from = model.known_from = num_tokens
        self.set_filled(model, num_tokens)

    def num_committed_elsewhere(self, model: Model, max_tokens: int) -> int:
        """Tokens of the longest prefix of full blocks that a live sequence has committed, and still sees."""
        num_spare = self.manager.num_blocks - self.layout.num_pages(len(model.tokens))
        if not self.manager.enable_prefix_caching or (
            self.per_page > 1 and num_spare < num_blocks_for(max_tokens, self.size)
        ):
            # In a pool that only just holds the sequence, a hit may be shorter.
            return 0
        found = [
            num_tokens
            for num_tokens in range(self.size, max_tokens + 1, self.size)
            for other in self.models
            if num_tokens <= other.blocks.num_committed * self.size
            if num_tokens >= other.known_from
            if other.prefix(num_tokens) == model.prefix(num_tokens)
        ]
        return max(found, default=0)

    def serve(self, model: Model) -> None:
        """Compute everything a sequence knows, as an engine would; preempt it when it does not fit."""
        if not model.blocks.block_ids:
            self.attach(model)
        if self.allocate(model.blocks, len(model.tokens)):
            self.check_alone(model, len(model.tokens))
            self.write(model, len(model.tokens))
            self.commit_written(model)
        else:
            self.release(model)

    def hide(self, model: Model) -> None:
        """Give back what the next token does not see."""
        num_free = self.manager.num_free_blocks
        self.hide_before(model, model.written)
        self.seen["hidden"] += self.manager.num_free_blocks > num_free

    def hide_before(self, model: Model, num_tokens: int) -> None:
        self.manager.hide(model.blocks, num_tokens)
        # The last token may be computed again, and others may go on behind the last full block.
        model.seen_from = max(model.seen_from, num_tokens - 1)
        model.known_from = max(model.known_from, num_tokens // self.size * self.size)

    def widen(self, model: Model, chunk: int, *, any_part: bool) -> int:
        """Make room for a chunk of a sequence's tokens; returns where it ends, -1 if there is no room."""
        start, num_tokens = model.written, len(model.tokens)
        end = min(start + chunk, num_tokens)
        before, num_free = self.snapshot(), self.manager.num_free_blocks
        num_first = self.num_new_pages(model.blocks, num_tokens, 0)
        num_all = self.num_new_pages(model.blocks, num_tokens, end)
        reach = self.manager.allocate_part(
            model.blocks, num_tokens, end, start if any_part and start < end else None
        )
        assert (reach >= end) == (num_all <= num_free)
        if reach < 0:
            assert self.snapshot() == before
            num_one = self.num_new_pages(model.blocks, num_tokens, (start // self.size + 1) * self.size)
            assert not any_part or start == end or num_one > num_free or num_first > num_free
            return -1
        assert reach == end or (any_part and start < reach < end)
        self.seen["part"] += reach < end
        assert num_free - self.manager.num_free_blocks == self.num_taken(before, model)
        return reach

    def num_new_pages(self, blocks: SequenceBlocks, num_tokens: int, end: int) -> int:
        num_first = num_blocks_for(num_tokens, self.size) - len(blocks.block_ids)
        num_others = [num_blocks_for(end, self.size) - len(window.block_ids) for window in blocks.windows]
        return num_blocks_for(max(0, num_first), self.per_page) + sum(max(0, number) for number in num_others)

    def num_taken(self, before: tuple[object, ...], model: Model) -> int:
        counts, now = before[0], self.manager.store.pool.ref_counts
        assert isinstance(counts, list)
        taken = [page for page, (old, new) in enumerate(zip(counts, now, strict=True)) if old != new]
        assert set(taken) <= set(self.manager.store.held_pages(model.blocks))
        return len(taken)

    def pick(self, number: int) -> Model:
        return self.models[number % len(self.models)]

    def free_row(self) -> int:
        return min(set(range(MAX_SEQUENCES)) - {model.row for model in self.models})

    def snapshot(self) -> tuple[object, ...]:
        pool = self.manager.store.pool
        tables = [[list(ids) for ids in ids_of(model.blocks)] for model in self.models]
        return list(pool.ref_counts), pool.free_ids, pool.cached_ids, tables

    def allocate(self, blocks: SequenceBlocks, num_tokens: int) -> bool:
        enough = self.num_new_pages(blocks, num_tokens, num_tokens) <= self.manager.num_free_blocks
        before, held = self.snapshot(), set(self.manager.store.held_pages(blocks))
        pool = self.manager.store.pool
        kept = pool.to_keep.intersection(pool.cached_ids)
        assert self.manager.allocate(blocks, num_tokens) is enough
        assert enough or self.snapshot() == before
        new = set(self.manager.store.held_pages(blocks)) - held
        if not kept.isdisjoint(new):
            assert pool.num_cached == pool.num_kept  # nothing else was left
            self.seen["kept evicted"] += 1
        self.seen["kept passed over"] += bool(kept and new)
        self.seen["not now"] += not enough
        return enough

    def check_alone(self, model: Model, stop: int) -> None:
        """Nobody else may have the blocks that a sequence is going to write."""
        if stop > model.written:
            first = model.written // self.size
            for group, ids in enumerate(ids_of(model.blocks)):
                others = {b for o in self.models if o is not model for b in ids_of(o.blocks)[group]}
                assert not others & set(ids[first:])

    def publish(self, model: Model, stop: int) -> None:
        ids = [list(ids) for ids in ids_of(model.blocks)]
        self.manager.publish(model.blocks, model.tokens, stop)
        assert ids_of(model.blocks) == ids
        self.set_filled(model, model.blocks.num_committed * self.size)

    def write(self, model: Model, stop: int, ids: Sequence[Sequence[int]] | None = None) -> None:
        """Compute tokens, into the blocks that the sequence had when the step began."""
        for position in range(model.written, stop):
            self.arena.write(ids or ids_of(model.blocks), position, model.prefix(position + 1))
        model.written = max(model.written, stop)

    def commit_written(self, model: Model) -> None:
        before, ids = model.blocks.block_ids, list(model.blocks.block_ids)
        changed = self.manager.commit(model.blocks, model.tokens, model.written)
        assert changed == (model.blocks.block_ids != ids) == (model.blocks.block_ids is not before)
        self.seen["de-duplicated"] += changed
        num_full = model.written // self.size
        is_short = model.blocks.num_committed < num_full
        # In a pool that only just holds a sequence, blocks stay its own that others have in several pages.
        assert self.colliding or self.per_page > 1 or not is_short
        self.seen["collided"] += is_short and self.colliding
        self.seen["stayed its own"] += is_short and not self.colliding
        self.set_filled(model, model.written)

    def set_filled(self, model: Model, num_tokens: int) -> None:
        model.filled = max(model.filled, num_tokens)

    def fork_at(self, parent: Model, num_tokens: int) -> bool:
        before = self.snapshot()
        num_free = self.manager.num_free_blocks
        try:
            forked = self.manager.fork(parent.blocks, num_tokens)
        except InvalidArgumentError:
            self.seen["fork refused"] += 1
            assert num_tokens < parent.seen_from
            assert self.snapshot() == before
            return False
        num_copies = len(self.layout.groups) if num_tokens % self.size else 0
        if forked is None:
            assert num_free < num_copies
            assert self.snapshot() == before
            return False
        blocks, copies = forked
        self.seen["copy on write"] += len(copies) > 0
        assert len(copies) == num_copies
        for source, destination in copies:
            self.arena.copy_page(source, destination)
        # With all rows in use, the child is going to replace its parent.
        row = parent.row if len(self.models) == MAX_SEQUENCES else self.free_row()
        child = Model(blocks, parent.salt, parent.tokens[:num_tokens], row, num_tokens, num_tokens)
        child.seen_from, child.known_from = min(parent.seen_from, num_tokens), parent.known_from
        self.models.append(child)
        return True

    def release(self, model: Model) -> None:
        self.manager.free(model.blocks)
        assert not any(ids_of(model.blocks))
        model.written = model.filled = model.seen_from = model.known_from = 0

    def drop(self, model: Model) -> None:
        self.manager.free(model.blocks)
        self.manager.free(model.blocks)
        self.models.remove(model)
