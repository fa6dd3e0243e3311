"""One sequence's view of the cache: its block ids, and the keys its full blocks are found by."""

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from octavo.errors import InvalidArgumentError

BlockHash = Callable[[bytes, bytes], bytes]


class BlockKey(NamedTuple):
    """What a full block is found by.

    Attributes:
        digest: hash of the parent's digest and of `content`, so it stands for the whole prefix.
        content: the block's token ids as int32 bytes; the first block's content starts with the salt.
    """

    digest: bytes
    content: bytes


def hash_block(parent_digest: bytes, content: bytes) -> bytes:
    """Return the 16-byte chained digest of a block."""
    return blake2b(parent_digest + content, digest_size=16).digest()


# Prompts with a common prefix have equal keys: a lookup takes a fifth of the time of hashing.
@lru_cache(maxsize=16384)
def _block_key(hash_block: BlockHash, parent_digest: bytes, content: bytes) -> BlockKey:
    return BlockKey(hash_block(parent_digest, content), content)


GONE = -1
"""Stands in a group's list for a block that no token sees any more."""


@dataclass(slots=True, eq=False)
class WindowBlocks:
    """A sequence's blocks in one group of layers behind the first.

    Attributes:
        window: tokens that its layers see; None: all.
        block_ids: as far as tokens were computed, a block for each of the first group's; GONE for those
            that were given back, which are the first ones. Otherwise the list changes as the first group's.
        num_gone: how many were given back.
    """

    window: int | None
    block_ids: list[int] = field(default_factory=list)
    num_gone: int = 0

    @property
    def held(self) -> list[int]:
        """The blocks that were not given back."""
        return self.block_ids[self.num_gone :]

    def first_seen(self, position: int, block_size: int) -> int:
        """Return the first block that the token at a position sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window) // block_size

    def first_kept(self, num_tokens: int, block_size: int) -> int:
        """Return the first block that stays behind `num_tokens` tokens.

        The last of them may be computed again, as a fork does, and all behind the last full block, as a
        sequence does that goes on from there.
        """
        return self.first_seen(num_tokens // block_size * block_size - 1, block_size)


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """The blocks of one sequence. Made and changed by `KVCacheManager`; read by everyone else.

        block_ids   [ 7 | 2 | 9 | 4 | 5 ]
        tokens      [###|###|##.|...|...]      # holds a computed token    . reserved
                     committed=2  ^ num_filled_tokens = 2.67 blocks

    Blocks from the one that holds position num_filled_tokens on are this sequence's alone, so that it may
    write there. All blocks before are full; they may be shared and are never written again.

    Attributes:
        block_size: tokens per block.
        salt: namespace; sequences with different salts never share a block.
        hash_block: the hash function of `block_keys`.
        is_kept: its blocks are evicted after those of others.
        block_ids: blocks in order. The list only ever grows in place; any other change makes a new list,
            which is how `BlockTables` notices.
        num_committed: leading full blocks that are registered: matched, published or committed.
        num_filled_tokens: leading tokens that are in the cache (matched, forked or committed), or will be
            when what was published is computed.
        block_keys: keys of the leading full blocks that are hashed so far.
        windows: its blocks in the groups of layers behind the first.
        branches: numbers of leading blocks that others may continue: those that it was matched with, those
            of them that layers with all keys had, and those of its tokens then.
    """

    block_size: int
    salt: bytes = b""
    hash_block: BlockHash = hash_block
    is_kept: bool = False
    block_ids: list[int] = field(default_factory=list)
    num_committed: int = 0
    num_filled_tokens: int = 0
    block_keys: list[BlockKey] = field(default_factory=list)
    windows: tuple[WindowBlocks, ...] = ()
    branches: tuple[int, ...] = ()

    @property
    def capacity(self) -> int:
        """Tokens that fit into its blocks of the first group."""
        return len(self.block_ids) * self.block_size

    @property
    def lists(self) -> tuple[list[int], ...]:
        """Its lists of block ids, one for each group of layers."""
        return (self.block_ids, *(window.block_ids for window in self.windows))

    @property
    def reach(self) -> int:
        """Tokens that fit into the blocks of all groups."""
        num_blocks = len(self.block_ids)
        for window in self.windows:
            num_blocks = min(num_blocks, len(window.block_ids))
        return num_blocks * self.block_size

    def sees_window(self, num_tokens: int) -> bool:
        """Return whether it has all that the token behind the first `num_tokens` sees."""
        size = self.block_size
        return all(window.num_gone <= window.first_seen(num_tokens, size) for window in self.windows)

    def grows_in_its_last_block(self, num_tokens: int) -> bool:
        """Return whether `num_tokens`, at least those filled now, fit the blocks without filling another."""
        size = self.block_size
        return (
            num_tokens // size == self.num_committed
            and self.num_filled_tokens <= num_tokens <= len(self.block_ids) * size
        )

    def num_full_blocks(self, token_ids: Sequence[int], num_tokens: int) -> int:
        """Return how many blocks the first `num_tokens` of `token_ids` fill; 0 for 0 tokens or less.

        Raises:
            InvalidArgumentError: there are fewer token ids than that.
        """
        if num_tokens > len(token_ids):
            raise InvalidArgumentError(f"expected at least {num_tokens} token ids, got {len(token_ids)}")
        return max(0, num_tokens) // self.block_size

    def extend_keys(self, token_ids: Sequence[int], num_blocks: int) -> None:
        """Hash the full blocks up to `num_blocks` that are not hashed yet.

        Raises:
            InvalidArgumentError: a token id is not an int32; so do the next two methods.
        """
        num_known = len(self.block_keys)
        if num_blocks > num_known:
            new_token_ids = token_ids[num_known * self.block_size : num_blocks * self.block_size]
            self._append_keys(pack_token_ids(new_token_ids))

    def keys(self, token_ids: Sequence[int], first: int, num_blocks: int) -> Iterator[BlockKey]:
        """Yield the keys of full blocks `first` .. `num_blocks` - 1, and hash them as they are needed."""
        for index in range(first, num_blocks):
            if index == len(self.block_keys):
                self.extend_keys(token_ids, min(num_blocks, 2 * index + 1))
            yield self.block_keys[index]

    def num_equal_blocks(self, token_ids: Sequence[int], other: "SequenceBlocks", num_blocks: int) -> int:
        """Count the leading registered blocks of `other` that hold `token_ids`; at most `num_blocks`."""
        num_blocks = min(num_blocks, other.num_committed, len(other.block_keys))
        if num_blocks == 0 or self.salt != other.salt:
            return 0
        contents = b"".join(key.content for key in other.block_keys[:num_blocks])
        stored = np.frombuffer(contents, np.int32, offset=len(self.salt))
        mine = np.frombuffer(pack_token_ids(token_ids[: num_blocks * self.block_size]), np.int32)
        differs = stored != mine
        first = int(differs.argmax())
        return first // self.block_size if differs[first] else num_blocks

    def require_unchanged(self, token_ids: Sequence[int], start: int, stop: int) -> None:
        """Raise InvalidArgumentError if token ids differ from those hashed for blocks `start` .. `stop` - 1.

        Otherwise keys of other tokens would attach or register wrong contents. A sequence's tokens only grow
        at the end; `truncate` and `free` forget the keys they invalidate.
        """
        stop = min(stop, len(self.block_keys))
        if start < stop:
            known = b"".join(key.content for key in self.block_keys[start:stop])
            packed = pack_token_ids(token_ids[start * self.block_size : stop * self.block_size])
            if known != (packed if start else self.salt + packed):
                raise InvalidArgumentError(
                    "expected the token ids of earlier calls, perhaps with more at the end, got different "
                    "ones; truncate or free the sequence first"
                )

    def require_empty(self) -> None:
        """Raise InvalidArgumentError if the sequence holds blocks."""
        if self.block_ids:
            raise InvalidArgumentError(
                f"expected an empty sequence, got one with {len(self.block_ids)} blocks; free it first"
            )

    def require_reach(self, num_tokens: int) -> None:
        """Raise InvalidArgumentError if `num_tokens` is negative or exceeds the reach."""
        reach = self.reach
        if not 0 <= num_tokens <= reach:
            raise InvalidArgumentError(
                f"expected 0 .. {reach} tokens (the capacity of the sequence's {reach // self.block_size} "
                f"blocks), got {num_tokens}; allocate first"
            )

    def clear(self) -> None:
        """Forget everything but the salt."""
        self.block_ids = []
        for window in self.windows:
            window.block_ids, window.num_gone = [], 0
        self.branches = ()
        self.block_keys = []
        self.num_committed = 0
        self.num_filled_tokens = 0

    def _append_keys(self, packed: bytes) -> None:
        size, keys, hash_block = 4 * self.block_size, self.block_keys, self.hash_block
        parent = keys[-1].digest if keys else hash_block(b"", self.salt)
        for start in range(0, len(packed), size):
            content = packed[start : start + size]
            if not keys:
                # The stored contents are compared on a hit, so the salt has to be among them.
                content = self.salt + content
            key = _block_key(hash_block, parent, content)
            keys.append(key)
            parent = key.digest


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Return token ids as int32 in the machine's byte order.

    Raises:
        InvalidArgumentError: they are no sequence of integers of 32 bits.
    """
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return token_ids.tobytes()
    try:
        # struct is twice as fast as the array module.
        return struct.pack(f"{len(token_ids)}i", *token_ids)
    except (struct.error, TypeError) as error:
        raise InvalidArgumentError(f"token ids must be integers of at most 32 bits: {error}") from error
