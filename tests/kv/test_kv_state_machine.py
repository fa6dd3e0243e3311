"""Random operations against a model of the cells: every sequence must read back exactly its own tokens.

A cell holds what keys and values depend on: the salt and all tokens up to its position. Reading a block
that is right in its own tokens, but not in those before them, is therefore an error too.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.errors import InvalidArgumentError
from octavo.kv import BlockTables, KVCacheManager, SequenceBlocks, hash_block, slot_mapping

MAX_SEQUENCES = 6
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=10)
SALTS = st.sampled_from([b"", b"", b"", b"tenant"])
PICK = st.integers(0, 2**16)

Prefix = tuple[bytes, tuple[int, ...]]


def colliding_hash(parent_digest: bytes, content: bytes) -> bytes:
    """Four values only."""
    return bytes([hash_block(parent_digest, content)[0] & 3])


@dataclass(eq=False)
class Model:
    """What one sequence should hold. `written` tokens are in the cells, `filled` of them are committed."""

    blocks: SequenceBlocks
    salt: bytes
    tokens: list[int]
    row: int
    written: int = 0
    filled: int = 0
    announced: set[Prefix] = field(default_factory=set)

    def prefix(self, num_tokens: int) -> Prefix:
        return self.salt, tuple(self.tokens[:num_tokens])

    def full_prefixes(self, start: int, stop: int) -> set[Prefix]:
        size = self.blocks.block_size
        return {self.prefix(size * (index + 1)) for index in range(start, stop)}


class ManagerMachine(RuleBasedStateMachine):
    """Plain dictionaries against the manager."""

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.integers(1, 4),
        caching=st.sampled_from([True, True, True, False]),
        colliding=st.sampled_from([False, False, True]),
    )
    def start(self, num_blocks: int, block_size: int, caching: bool, colliding: bool) -> None:
        self.colliding = colliding
        self.manager = KVCacheManager(
            num_blocks,
            block_size,
            enable_prefix_caching=caching,
            hash_block=colliding_hash if colliding else hash_block,
        )
        self.size = block_size
        self.models: list[Model] = []
        self.cells: dict[int, Prefix] = {}
        self.tables = BlockTables(MAX_SEQUENCES, num_blocks)

    # ---- sequences come ----

    @precondition(lambda self: len(self.models) < MAX_SEQUENCES)
    @rule(tokens=TOKENS, salt=SALTS)
    def add(self, tokens: list[int], salt: bytes) -> None:
        self.models.append(Model(self.manager.new_sequence(salt), salt, tokens, self.free_row()))

    @precondition(lambda self: self.models)
    @rule(pick=PICK)
    def match(self, pick: int) -> None:
        model = self.pick(pick)
        max_tokens = len(model.tokens) - 1
        if model.blocks.block_ids:
            with pytest.raises(InvalidArgumentError):
                self.manager.match_prefix(model.blocks, model.tokens, max_tokens)
            return
        num_tokens = self.manager.match_prefix(model.blocks, model.tokens, max_tokens)
        assert num_tokens % self.size == 0
        assert num_tokens <= max(0, max_tokens)
        event("match: hit" if num_tokens else "match: miss")
        model.written = num_tokens
        self.set_filled(model, num_tokens)

    @precondition(lambda self: self.models and len(self.models) < MAX_SEQUENCES)
    @rule(pick=PICK, length=PICK)
    def fork(self, pick: int, length: int) -> None:
        parent = self.pick(pick)
        self.fork_at(parent, length % (parent.filled + 1))

    # ---- sequences grow ----

    @precondition(lambda self: self.models)
    @rule(pick=PICK, tokens=TOKENS)
    def append(self, pick: int, tokens: list[int]) -> None:
        model = self.pick(pick)
        if len(model.tokens) < 24:
            model.tokens.extend(tokens)

    @precondition(lambda self: self.models)
    @rule(
        pick=PICK,
        chunk=st.integers(1, 12),
        reserve=st.integers(0, 3),
        commit=st.sampled_from([True, True, False]),
    )
    def compute(self, pick: int, chunk: int, reserve: int, commit: bool) -> None:
        model = self.pick(pick)
        stop = min(model.written + chunk, len(model.tokens))
        if not self.allocate(model.blocks, stop + reserve):
            return
        self.write(model, stop)
        if commit:
            self.commit_written(model)

    @precondition(lambda self: self.models)
    @rule(pick=PICK)
    def commit(self, pick: int) -> None:
        self.commit_written(self.pick(pick))

    @precondition(lambda self: self.models)
    @rule(pick=PICK)
    def announce(self, pick: int) -> None:
        model = self.pick(pick)
        self.manager.announce(model.blocks, model.tokens)
        if self.manager.enable_prefix_caching:
            model.announced |= model.full_prefixes(model.filled // self.size, len(model.tokens) // self.size)

    @precondition(lambda self: self.models)
    @rule(pick=PICK)
    def ask_whether_in_flight(self, pick: int) -> None:
        model = self.pick(pick)
        max_tokens = len(model.tokens) - 1
        if model.blocks.block_ids or max_tokens < 0:
            return
        before = self.snapshot()
        answer = self.manager.is_prefix_in_flight(model.blocks, model.tokens, max_tokens)
        assert self.snapshot() == before
        if not self.colliding:
            assert answer == self.expect_in_flight(model, max_tokens)
            event(f"in flight: {answer}")

    # ---- sequences shrink and go ----

    @precondition(lambda self: self.models)
    @rule(pick=PICK, length=PICK)
    def truncate(self, pick: int, length: int) -> None:
        model = self.pick(pick)
        num_tokens = length % (min(len(model.tokens), model.blocks.capacity) + 1)
        before = self.snapshot()
        try:
            self.manager.truncate(model.blocks, num_tokens)
        except InvalidArgumentError:
            event("truncate: refused")
            assert num_tokens % self.size
            assert num_tokens < model.filled
            assert self.snapshot() == before
            if self.fork_at(model, num_tokens):  # the way out that the message names
                self.drop(model)
            return
        if num_tokens < model.written:
            del model.tokens[num_tokens:]
        model.written = min(model.written, num_tokens)
        model.filled = min(model.filled, num_tokens)
        num_full = num_tokens // self.size * self.size
        model.announced = {prefix for prefix in model.announced if len(prefix[1]) <= num_full}

    @precondition(lambda self: self.models)
    @rule(pick=PICK)
    def preempt(self, pick: int) -> None:
        model = self.pick(pick)
        self.manager.free(model.blocks)
        assert model.blocks.block_ids == []
        model.written = model.filled = 0
        model.announced = set()

    @precondition(lambda self: self.models)
    @rule(pick=PICK)
    def finish_or_abort(self, pick: int) -> None:
        self.drop(self.pick(pick))

    @rule(share=st.sampled_from([1, 2, 4]))
    def evict(self, share: int) -> None:
        hog = self.manager.new_sequence()
        num_blocks = self.manager.num_free_blocks // share
        assert self.allocate(hog, num_blocks * self.size)
        if share == 1:
            assert self.manager.stats().num_cached == 0
        assert not self.allocate(hog, (num_blocks + self.manager.num_free_blocks + 1) * self.size)
        self.manager.free(hog)

    @rule()
    def reset(self) -> None:
        num_cached = self.manager.stats().num_cached
        assert self.manager.reset_prefix_cache() == num_cached

    # ---- what must hold after every step ----

    @invariant()
    def bookkeeping_agrees(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_invariants()

    @invariant()
    def every_sequence_reads_back_its_own_tokens(self) -> None:
        for model in getattr(self, "models", ()):
            slots = slot_mapping(model.blocks.block_ids, 0, model.written, self.size).tolist()
            for position, slot in enumerate(slots):
                assert self.cells[slot] == model.prefix(position + 1)
            assert model.blocks.num_filled_tokens == model.filled

    @invariant()
    def rows_follow_without_being_rewritten(self) -> None:
        for model in getattr(self, "models", ()):
            self.tables.update(model.row, model.blocks.block_ids)
            row = self.tables.rows([model.row], self.tables.length(model.row))
            assert row[0].tolist() == model.blocks.block_ids

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        event(f"evictions: {self.manager.stats().num_evictions > 0}")
        for model in list(self.models):
            self.drop(model)
        self.manager.check_invariants()
        assert self.manager.num_free_blocks == self.manager.num_blocks
        self.manager.reset_prefix_cache()
        stats = self.manager.stats()
        assert stats.num_free == self.manager.num_blocks
        assert stats.reserved_unfilled_tokens == stats.num_shared == 0

    # ---- helpers ----

    def pick(self, number: int) -> Model:
        return self.models[number % len(self.models)]

    def free_row(self) -> int:
        return min(set(range(MAX_SEQUENCES)) - {model.row for model in self.models})

    def snapshot(self) -> tuple[object, ...]:
        pool = self.manager._store.pool
        tables = [list(model.blocks.block_ids) for model in self.models]
        return list(pool.ref_counts), pool.free_ids, pool.cached_ids, tables

    def allocate(self, blocks: SequenceBlocks, num_tokens: int) -> bool:
        num_needed = -(-num_tokens // self.size) - len(blocks.block_ids)
        enough = num_needed <= self.manager.num_free_blocks
        before = self.snapshot()
        assert self.manager.allocate(blocks, num_tokens) is enough
        assert enough or self.snapshot() == before
        return enough

    def write(self, model: Model, stop: int) -> None:
        """Compute tokens: nobody else may have the blocks they go to."""
        first = model.written // self.size
        others = {b for other in self.models if other is not model for b in other.blocks.block_ids}
        if stop > model.written:
            assert not others & set(model.blocks.block_ids[first:])
        slots = slot_mapping(model.blocks.block_ids, model.written, stop, self.size).tolist()
        for position, slot in enumerate(slots, start=model.written):
            self.cells[slot] = model.prefix(position + 1)
        model.written = max(model.written, stop)

    def commit_written(self, model: Model) -> None:
        before, ids = model.blocks.block_ids, list(model.blocks.block_ids)
        changed = self.manager.commit(model.blocks, model.tokens, model.written)
        assert changed == (model.blocks.block_ids != ids)
        assert changed == (model.blocks.block_ids is not before)
        event(f"commit: de-duplicated {changed}")
        if not self.colliding:
            assert model.blocks.num_committed == model.written // self.size
        self.set_filled(model, model.written)

    def set_filled(self, model: Model, num_tokens: int) -> None:
        model.filled = max(model.filled, num_tokens)
        model.announced -= model.full_prefixes(0, model.filled // self.size)

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
        assert len(copies) == (num_tokens % self.size > 0)
        for source, destination in copies:
            for offset in range(self.size):
                cell = self.cells.get(source * self.size + offset, (b"garbage", ()))
                self.cells[destination * self.size + offset] = cell
        child = Model(blocks, parent.salt, parent.tokens[:num_tokens], 0, num_tokens, num_tokens)
        if len(self.models) == MAX_SEQUENCES:  # it is going to replace its parent
            child.row = parent.row
        else:
            child.row = self.free_row()
        self.models.append(child)
        return True

    def drop(self, model: Model) -> None:
        self.manager.free(model.blocks)
        self.manager.free(model.blocks)
        self.models.remove(model)

    def expect_in_flight(self, model: Model, max_tokens: int) -> bool:
        probe = self.manager.new_sequence(model.salt)
        num_matched = self.manager.match_prefix(probe, model.tokens, max_tokens)
        self.manager.free(probe)
        wanted = model.prefix(num_matched + self.size)
        if num_matched + self.size > max_tokens:
            return False
        return any(wanted in other.announced for other in self.models if other is not model)


TestKVStateMachine = ManagerMachine.TestCase
TestKVStateMachine.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
