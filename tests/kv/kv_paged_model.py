"""PagedSequences next to a dict of lists and a model of the cells.

A cell holds the tokens up to its position: what keys and values depend on. So a block that is right in its
own tokens, but not in those before them, is an error too.
"""

from collections import Counter

import numpy as np
import pytest

from octavo.errors import InvalidArgumentError, OutOfBlocksError
from octavo.kv import Extension, PagedSequences, last_position, next_position, num_blocks_for


class ModelledSequences:
    """Operations on PagedSequences, each with what must come of it.

    Attributes:
        expected: the model: tokens by name.
        seen: how often something worth testing happened.
    """

    def __init__(self, num_blocks: int, size: int, *, caching: bool) -> None:
        self.seen: Counter[str] = Counter()
        self.size = size
        self.paged = PagedSequences(
            num_blocks, size, enable_prefix_caching=caching, bytes_per_block=10 * size
        )
        self.expected: dict[int, list[int]] = {}
        self.cells: dict[int, tuple[int, ...]] = {}

    def alloc(self, name: int, tokens: list[int]) -> None:
        if name in self.expected:
            with pytest.raises(InvalidArgumentError):
                self.paged.alloc(name, tokens)
            return
        before = self.paged.stats()
        try:
            extension = self.paged.alloc(name, tokens)
        except OutOfBlocksError:
            self.seen["alloc refused"] += 1
            assert self.paged.stats().num_referenced == before.num_referenced
            return
        assert extension.start % self.size == 0
        self.seen["prefix attached"] += extension.start > 0
        self.expected[name] = list(tokens)
        self.write(name, extension)

    def update(self, name: int, tokens: list[int]) -> None:
        if name not in self.expected:
            return
        num_before = len(self.expected[name])
        entries = self.paged.stats().num_table_entries
        try:
            extension = self.paged.update(name, tokens)
        except OutOfBlocksError:
            self.seen["update refused"] += 1
            assert self.paged.num_tokens(name) == num_before
            assert self.paged.stats().num_table_entries == entries
            return
        assert extension.start == num_before
        self.expected[name] += tokens
        self.write(name, extension)

    def fork(self, parent: int, child: int, percent: int) -> None:
        if parent not in self.expected or child in self.expected:
            return
        num_tokens = len(self.expected[parent]) * percent // 100
        try:
            copies = self.paged.fork(parent, child, num_tokens)
        except OutOfBlocksError:
            self.seen["fork refused"] += 1
            assert child not in self.paged
            return
        assert len(copies) == (num_tokens % self.size > 0)
        self.copy(copies)
        self.expected[child] = self.expected[parent][:num_tokens]

    def truncate(self, name: int, percent: int) -> None:
        if name not in self.expected:
            return
        num_tokens = len(self.expected[name]) * percent // 100
        try:
            copies = self.paged.truncate(name, num_tokens)
        except OutOfBlocksError:
            self.seen["truncate refused"] += 1
            assert num_tokens % self.size > 0
            return
        self.seen["truncate copied"] += len(copies)
        self.seen["truncate in place"] += num_tokens % self.size > 0 and not copies
        self.copy(copies)
        del self.expected[name][num_tokens:]

    def commit(self, name: int) -> None:
        if name in self.expected:
            num_referenced = self.paged.stats().num_referenced
            self.paged.commit(name)
            self.seen["joined"] += self.paged.stats().num_referenced < num_referenced

    def free(self, name: int) -> None:
        if name in self.expected:
            self.paged.free(name)
            del self.expected[name]

    def check(self) -> None:
        names = list(self.expected)
        table, lengths = self.paged.block_table(names)
        assert lengths.tolist() == [len(self.expected[name]) for name in names]
        for row, name in zip(table.tolist(), names, strict=True):
            tokens = self.expected[name]
            slots = [row[p // self.size] * self.size + p % self.size for p in range(len(tokens))]
            assert [self.cells[slot] for slot in slots] == [
                tuple(tokens[: p + 1]) for p in range(len(tokens))
            ]
        self.check_stats([num_blocks_for(len(self.expected[name]), self.size) for name in names])
        self.paged.manager.check_invariants()

    def check_stats(self, num_blocks: list[int]) -> None:
        """Every table is as long as its tokens need, so no block is leaked; bytes follow the counts."""
        stats = self.paged.stats()
        assert stats.num_table_entries == sum(num_blocks)
        assert stats.num_free + stats.num_cached + stats.num_referenced == stats.num_blocks
        num_tokens = sum(map(len, self.expected.values()))
        assert stats.reserved_unfilled_tokens == sum(num_blocks) * self.size - num_tokens
        assert stats.reserved_unfilled_bytes == 10 * stats.reserved_unfilled_tokens
        assert (
            stats.free_bytes + stats.cached_bytes + stats.referenced_bytes
            == 10 * self.size * stats.num_blocks
        )
        table, _ = self.paged.block_table(list(self.expected))
        uses = Counter(b for row, n in zip(table.tolist(), num_blocks, strict=True) for b in row[:n])
        assert stats.shared_bytes == 10 * self.size * sum(n > 1 for n in uses.values())
        assert stats.saved_bytes == 10 * self.size * sum(n - 1 for n in uses.values())
        self.seen["shared"] += stats.num_shared > 0

    def write(self, name: int, extension: Extension) -> None:
        tokens = self.expected[name]
        assert extension.positions.tolist() == list(range(extension.start, len(tokens)))
        assert extension.token_ids == tokens[extension.start :]
        self.require_alone(name, extension.slots // self.size)
        for position, slot in zip(extension.positions.tolist(), extension.slots.tolist(), strict=True):
            self.cells[slot] = tuple(tokens[: position + 1])
        table, _ = self.paged.block_table([name])
        index, offset = last_position(len(tokens), self.size)
        assert extension.slots[-1] == table[0, index] * self.size + offset
        if extension.start:
            following = next_position(extension.start, self.size)
            assert extension.slots[0] == table[0, following[0]] * self.size + following[1]

    def require_alone(self, name: int, block_ids: np.ndarray) -> None:
        """Copy-on-write: what is written belongs to this sequence alone."""
        others = [other for other in self.expected if other != name]
        table, lengths = self.paged.block_table(others)
        for row, length in zip(table.tolist(), lengths.tolist(), strict=True):
            assert not set(row[: num_blocks_for(length, self.size)]) & set(block_ids.tolist())

    def copy(self, copies: list[tuple[int, int]]) -> None:
        for source, destination in copies:
            for offset in range(self.size):
                self.cells[destination * self.size + offset] = self.cells.get(source * self.size + offset, ())

    def free_all(self) -> None:
        for name in list(self.expected):
            self.free(name)
        stats = self.paged.stats()
        assert stats.num_referenced == stats.num_table_entries == stats.num_shared == 0
