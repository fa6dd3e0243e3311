"""Short cuts of the manager's tests."""

from dataclasses import dataclass

from octavo.kv import KVCacheManager, SequenceBlocks, hash_block

TEN = list(range(10))

Prefix = tuple[bytes, tuple[int, ...]]


def colliding_hash(parent_digest: bytes, content: bytes) -> bytes:
    """Four values only."""
    return bytes([hash_block(parent_digest, content)[0] & 3])


@dataclass(eq=False)
class Model:
    """What one sequence should hold: `written` tokens in the cells, `filled` of them for the manager.

    It can be forked and cut at `seen_from` tokens and more, and others can go on from its full blocks at
    `known_from` tokens and more: before, windows may be gone.
    """

    blocks: SequenceBlocks
    salt: bytes
    tokens: list[int]
    row: int
    written: int = 0
    filled: int = 0
    seen_from: int = 0
    known_from: int = 0

    def prefix(self, num_tokens: int) -> Prefix:
        return self.salt, tuple(self.tokens[:num_tokens])


class Managers:
    """Makes managers and checks each one's invariants at the end of the test."""

    def __init__(self) -> None:
        self.made: list[KVCacheManager] = []

    def __call__(self, num_blocks: int = 8, block_size: int = 4, **options: object) -> KVCacheManager:
        self.made.append(KVCacheManager(num_blocks, block_size, **options))  # type: ignore[arg-type]
        return self.made[-1]


def computed(
    manager: KVCacheManager, token_ids: list[int], num_tokens: int | None = None, salt: bytes = b""
) -> SequenceBlocks:
    """Make a sequence without looking for cached blocks, and compute its tokens."""
    sequence = manager.new_sequence(salt)
    num_tokens = len(token_ids) if num_tokens is None else num_tokens
    assert manager.allocate(sequence, num_tokens)
    manager.commit(sequence, token_ids, num_tokens)
    return sequence


def num_matched(manager: KVCacheManager, token_ids: list[int], salt: bytes = b"") -> int:
    probe = manager.new_sequence(salt)
    num_tokens = manager.match_prefix(probe, token_ids, len(token_ids) - 1)
    manager.free(probe)
    return num_tokens
