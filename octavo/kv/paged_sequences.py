"""Paged key/value bookkeeping without an engine: named sequences, and an error when blocks run out."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import numpy as np

from octavo.errors import InvalidArgumentError, OutOfBlocksError
from octavo.kv.cache_stats import KVStats
from octavo.kv.manager import KVCacheManager
from octavo.kv.sequence_blocks import SequenceBlocks, pack_token_ids
from octavo.kv.slots import slot_mapping


@dataclass(frozen=True, slots=True, eq=False)
class Extension:
    """Tokens whose keys and values the caller now has to compute and write.

    Attributes:
        start: position of the first of them; the tokens before it are in the cache.
        slots: [n] int64 cache slots, one per token.
        token_ids: [n] the tokens.
    """

    start: int
    slots: np.ndarray
    token_ids: list[int]

    @property
    def positions(self) -> np.ndarray:
        """[n] int64 positions of the tokens in their sequence."""
        return np.arange(self.start, self.start + len(self.slots), dtype=np.int64)


@dataclass(slots=True)
class _Entry:
    blocks: SequenceBlocks
    token_ids: list[int]


class PagedSequences:
    """Named sequences over one paged cache, for your own model loop.

        extension = sequences.alloc("a", prompt)     write extension.slots, attend over the block table
        extension = sequences.update("a", [token])   write, attend, ...
        copies = sequences.fork("a", "b")            KVCache.copy_blocks(copies), then go on with both
        copies = sequences.truncate("b", 7)          the same; "b" continues at position 7
        sequences.free("a")

    Write the slots, or copy the blocks, that a call returns before the next call: `update`, `fork` and
    `commit` share full blocks with other sequences, and every call may reuse a block that has become free.

    A block that is handed out for writing belongs to one sequence alone. Sequences join where their tokens,
    and all tokens before them, are equal: `alloc` attaches the leading blocks that others have computed, and
    `commit` swaps a full block for an equal one that is there already.

    Methods raise InvalidArgumentError for unknown names. The constructor's arguments are those of
    KVCacheManager; bytes_per_block is ``cache.nbytes // cache.num_blocks`` of an octavo.attention.KVCache.

    Attributes:
        manager: the manager underneath.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        bytes_per_block: int = 0,
    ) -> None:
        self.manager = KVCacheManager(
            num_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            bytes_per_block=bytes_per_block,
        )
        self._entries: dict[Hashable, _Entry] = {}

    def __contains__(self, sequence_id: Hashable) -> bool:
        return sequence_id in self._entries

    def alloc(self, sequence_id: Hashable, token_ids: Sequence[int], *, salt: bytes = b"") -> Extension:
        """Start a sequence; leading blocks that are cached already are shared instead of allocated.

        Args:
            sequence_id: any name that is not in use.
            token_ids: at least one token.
            salt: only sequences with equal salts share blocks.

        Returns:
            The tokens to compute: at least one.

        Raises:
            InvalidArgumentError: the name is in use, there are no tokens, or one is not an int32.
            OutOfBlocksError: too few blocks are free; nothing was allocated.
        """
        self._require_new(sequence_id)
        pack_token_ids(token_ids)
        if len(token_ids) == 0:
            raise InvalidArgumentError("a sequence needs at least one token, got none")
        entry = _Entry(self.manager.new_sequence(salt), list(token_ids))
        num_cached = self.manager.match_prefix(entry.blocks, entry.token_ids, len(token_ids) - 1)
        if not self.manager.allocate(entry.blocks, len(token_ids)):
            self.manager.free(entry.blocks)
            raise self._out_of_blocks(len(token_ids))
        self._entries[sequence_id] = entry
        return self._extension(entry, num_cached)

    def update(self, sequence_id: Hashable, token_ids: Sequence[int]) -> Extension:
        """Append any number of tokens to a sequence.

        Raises:
            InvalidArgumentError: a token is not an int32; the sequence is unchanged.
            OutOfBlocksError: too few blocks are free; likewise.
        """
        entry = self._entry(sequence_id)
        pack_token_ids(token_ids)
        self.commit(sequence_id)
        start = len(entry.token_ids)
        if not self.manager.allocate(entry.blocks, start + len(token_ids)):
            raise self._out_of_blocks(start + len(token_ids))
        entry.token_ids.extend(token_ids)
        return self._extension(entry, start)

    def commit(self, sequence_id: Hashable) -> None:
        """Declare that all slots handed out for a sequence are written; `update` and `fork` imply it."""
        entry = self._entry(sequence_id)
        self.manager.commit(entry.blocks, entry.token_ids, len(entry.token_ids))

    def fork(
        self, parent_id: Hashable, child_id: Hashable, num_tokens: int | None = None
    ) -> list[tuple[int, int]]:
        """Start a sequence with the first tokens of another (None: all), sharing its full blocks.

        Returns:
            Blocks to copy (source id, destination id) before the next call: one or none.

        Raises:
            InvalidArgumentError: the child's name is in use, or the parent has fewer tokens.
            OutOfBlocksError: no block is free for the copy; nothing was allocated.
        """
        self._require_new(child_id)
        parent = self._entry(parent_id)
        self.commit(parent_id)
        num_tokens = len(parent.token_ids) if num_tokens is None else _whole(num_tokens)
        child, copies = self._fork(parent, num_tokens)
        self._entries[child_id] = child
        return copies

    def truncate(self, sequence_id: Hashable, num_tokens: int) -> list[tuple[int, int]]:
        """Forget the tokens of a sequence from position `num_tokens` on, and give back their blocks.

        The block that the cut falls into will be written again. If other sequences have it, or may find it
        in the prefix cache, the sequence gets a copy of it.

        Returns:
            Blocks to copy (source id, destination id) before the next call: one or none.

        Raises:
            InvalidArgumentError: num_tokens is not in 0 .. number of tokens.
            OutOfBlocksError: no block is free for the copy; the sequence is unchanged. A cut at a multiple
                of the block size never needs one.
        """
        entry = self._entry(sequence_id)
        if not 0 <= _whole(num_tokens) <= len(entry.token_ids):
            raise InvalidArgumentError(
                f"sequence {sequence_id!r} has {len(entry.token_ids)} tokens; cannot cut it at {num_tokens}"
            )
        if self.manager.can_cut(entry.blocks, num_tokens):
            self.manager.truncate(entry.blocks, num_tokens)
            del entry.token_ids[num_tokens:]
            return []
        self._entries[sequence_id], copies = self._fork(entry, num_tokens)
        self.manager.free(entry.blocks)
        return copies

    def free(self, sequence_id: Hashable) -> None:
        """End a sequence. Its committed blocks stay in the prefix cache until they are evicted."""
        self.manager.free(self._entry(sequence_id).blocks)
        del self._entries[sequence_id]

    def num_tokens(self, sequence_id: Hashable) -> int:
        """Return the length of a sequence in tokens, those handed out but not yet written included."""
        return len(self._entry(sequence_id).token_ids)

    def stats(self) -> KVStats:
        """Return the cache's figures; slots that were handed out for tokens count as filled."""
        entries = self._entries.values()
        unfilled = sum(entry.blocks.capacity - len(entry.token_ids) for entry in entries)
        return replace(self.manager.stats(), reserved_unfilled_tokens=unfilled)

    def block_table(self, sequence_ids: Sequence[Hashable]) -> tuple[np.ndarray, np.ndarray]:
        """Return the block table and the lengths of S sequences for an attention call.

        Returns:
            [S, longest] int32 block ids, 0 past a sequence's last block, and [S] int32 lengths in tokens.
        """
        entries = [self._entry(sequence_id) for sequence_id in sequence_ids]
        width = max((len(entry.blocks.block_ids) for entry in entries), default=0)
        table = np.zeros((len(entries), width), dtype=np.int32)
        for row, entry in zip(table, entries, strict=True):
            row[: len(entry.blocks.block_ids)] = entry.blocks.block_ids
        return table, np.array([len(entry.token_ids) for entry in entries], dtype=np.int32)

    def _fork(self, parent: _Entry, num_tokens: int) -> tuple[_Entry, list[tuple[int, int]]]:
        forked = self.manager.fork(parent.blocks, num_tokens)
        if forked is None:
            raise self._out_of_blocks(num_tokens)
        blocks, copies = forked
        return _Entry(blocks, parent.token_ids[:num_tokens]), copies

    def _extension(self, entry: _Entry, start: int) -> Extension:
        block_ids, stop = entry.blocks.block_ids, len(entry.token_ids)
        return Extension(
            start, slot_mapping(block_ids, start, stop, self.manager.block_size), entry.token_ids[start:]
        )

    def _entry(self, sequence_id: Hashable) -> _Entry:
        if sequence_id not in self._entries:
            raise InvalidArgumentError(f"there is no sequence {sequence_id!r}; alloc it first")
        return self._entries[sequence_id]

    def _require_new(self, sequence_id: Hashable) -> None:
        if sequence_id in self._entries:
            raise InvalidArgumentError(f"sequence {sequence_id!r} exists; update it, or free it first")

    def _out_of_blocks(self, num_tokens: int) -> OutOfBlocksError:
        manager = self.manager
        advice = "free a sequence" if manager.can_ever_fit(num_tokens) else "make the pool larger"
        return OutOfBlocksError(
            f"{num_tokens} tokens do not fit now: {manager.num_free_blocks} of {manager.num_blocks} blocks "
            f"of {manager.block_size} tokens are free; {advice}. Nothing was allocated."
        )


def _whole(num_tokens: object) -> int:
    if not isinstance(num_tokens, Integral):
        raise InvalidArgumentError(f"num_tokens must be an integer, got {num_tokens!r}")
    return int(num_tokens)
