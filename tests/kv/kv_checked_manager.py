"""A manager next to a model of the cells: every sequence must read back exactly its own tokens.

A cell holds what keys and values depend on: the salt and all tokens up to its position. Reading a block
that is right in its own tokens, but not in those before them, is therefore an error too.
"""

from collections import Counter

from kv_helpers import Model, Prefix, colliding_hash

from octavo.kv import BlockTables, KVCacheManager, SequenceBlocks, hash_block, slot_mapping

MAX_SEQUENCES = 6


class CheckedManager:
    """A manager beside the model of its cells: the steps of all operations, each with its checks.

    Attributes:
        seen: how often something worth testing happened.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, caching: bool, colliding: bool, max_kept: int = 0
    ) -> None:
        self.seen: Counter[str] = Counter()
        self.colliding = colliding
        self.manager = KVCacheManager(
            num_blocks,
            block_size,
            enable_prefix_caching=caching,
            max_kept_blocks=max_kept,
            hash_block=colliding_hash if colliding else hash_block,
        )
        self.size = block_size
        self.models: list[Model] = []
        self.cells: dict[int, Prefix] = {}
        self.tables = BlockTables(MAX_SEQUENCES, num_blocks)
        for _ in range(2):
            self.models.append(Model(self.manager.new_sequence(), b"", [0] * 8, self.free_row()))

    # ---- what must hold after every step ----

    def check(self) -> None:
        """Assert that the bookkeeping agrees, all tokens read back, and the batch's rows follow."""
        self.seen["steps"] += 1
        self.manager.check_invariants()
        for model in self.models:
            self.check_contents(model)
            if self.seen["steps"] % 4 == 0:  # rows may be several operations behind
                self.tables.update(model.row, model.blocks.block_ids)
                row = self.tables.rows([model.row], self.tables.length(model.row))
                assert row[0].tolist() == model.blocks.block_ids

    def check_contents(self, model: Model) -> None:
        slots = slot_mapping(model.blocks.block_ids, 0, model.written, self.size).tolist()
        for position, slot in enumerate(slots):
            assert self.cells[slot] == model.prefix(position + 1)
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
        num_tokens = self.manager.match_prefix(model.blocks, model.tokens, max_tokens)
        assert num_tokens % self.size == 0
        assert num_tokens <= max(0, max_tokens)
        assert self.colliding or num_tokens >= self.num_committed_elsewhere(model, max_tokens)
        self.seen["hit"] += num_tokens > 0
        model.written = num_tokens
        self.set_filled(model, num_tokens)

    def num_committed_elsewhere(self, model: Model, max_tokens: int) -> int:
        """Tokens of the longest prefix of full blocks that a live sequence has committed."""
        caching = self.manager.enable_prefix_caching
        found = [
            num_tokens
            for num_tokens in range(self.size, max_tokens + 1, self.size)
            for other in self.models
            if caching and num_tokens <= other.filled and other.prefix(num_tokens) == model.prefix(num_tokens)
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

    def pick(self, number: int) -> Model:
        return self.models[number % len(self.models)]

    def free_row(self) -> int:
        return min(set(range(MAX_SEQUENCES)) - {model.row for model in self.models})

    def snapshot(self) -> tuple[object, ...]:
        pool = self.manager.store.pool
        tables = [list(model.blocks.block_ids) for model in self.models]
        return list(pool.ref_counts), pool.free_ids, pool.cached_ids, tables

    def allocate(self, blocks: SequenceBlocks, num_tokens: int) -> bool:
        enough = num_tokens <= blocks.capacity + self.manager.num_free_blocks * self.size
        before, num_held = self.snapshot(), len(blocks.block_ids)
        pool = self.manager.store.pool
        kept = pool.to_keep.intersection(pool.cached_ids)
        assert self.manager.allocate(blocks, num_tokens) is enough
        assert enough or self.snapshot() == before
        if not kept.isdisjoint(blocks.block_ids[num_held:]):
            assert pool.num_cached == pool.num_kept  # nothing else was left
            self.seen["kept evicted"] += 1
        self.seen["kept passed over"] += bool(kept) and len(blocks.block_ids) > num_held
        self.seen["not now"] += not enough
        return enough

    def check_alone(self, model: Model, stop: int) -> None:
        """Nobody else may have the blocks that a sequence is going to write."""
        others = {b for other in self.models if other is not model for b in other.blocks.block_ids}
        if stop > model.written:
            assert not others & set(model.blocks.block_ids[model.written // self.size :])

    def publish(self, model: Model, stop: int) -> None:
        ids = list(model.blocks.block_ids)
        self.manager.publish(model.blocks, model.tokens, stop)
        assert model.blocks.block_ids == ids
        self.set_filled(model, model.blocks.num_committed * self.size)

    def write(self, model: Model, stop: int) -> None:
        """Compute tokens."""
        slots = slot_mapping(model.blocks.block_ids, model.written, stop, self.size).tolist()
        for position, slot in enumerate(slots, start=model.written):
            self.cells[slot] = model.prefix(position + 1)
        model.written = max(model.written, stop)

    def commit_written(self, model: Model) -> None:
        before, ids = model.blocks.block_ids, list(model.blocks.block_ids)
        changed = self.manager.commit(model.blocks, model.tokens, model.written)
        assert changed == (model.blocks.block_ids != ids) == (model.blocks.block_ids is not before)
        self.seen["de-duplicated"] += changed
        num_full = model.written // self.size
        assert self.colliding or model.blocks.num_committed == num_full
        self.seen["collided"] += model.blocks.num_committed < num_full
        self.set_filled(model, model.written)

    def set_filled(self, model: Model, num_tokens: int) -> None:
        model.filled = max(model.filled, num_tokens)

    def fork_at(self, parent: Model, num_tokens: int) -> bool:
        before = self.snapshot()
        num_free = self.manager.num_free_blocks
        forked = self.manager.fork(parent.blocks, num_tokens)
        if forked is None:
            assert num_tokens % self.size
            assert num_free == 0
            assert self.snapshot() == before
            return False
        blocks, copies = forked
        self.seen["copy on write"] += len(copies)
        assert len(copies) == (num_tokens % self.size > 0)
        for source, destination in copies:
            for offset in range(self.size):
                cell = self.cells.get(source * self.size + offset, (b"garbage", ()))
                self.cells[destination * self.size + offset] = cell
        # With all rows in use, the child is going to replace its parent.
        row = parent.row if len(self.models) == MAX_SEQUENCES else self.free_row()
        self.models.append(
            Model(blocks, parent.salt, parent.tokens[:num_tokens], row, num_tokens, num_tokens)
        )
        return True

    def release(self, model: Model) -> None:
        self.manager.free(model.blocks)
        assert model.blocks.block_ids == []
        model.written = model.filled = 0

    def drop(self, model: Model) -> None:
        self.manager.free(model.blocks)
        self.manager.free(model.blocks)
        self.models.remove(model)
