"""Slots of tokens. A slot is block id * block_size + offset: one row of the cache.

position   0 1 2 3 | 4 5 6 7 | 8 .          block_size 4, block_ids [7, 2, 9]
block        7     |   2     | 9
slot      28 .. 31 | 8 .. 11 | 36 .
"""

from collections.abc import Sequence

import numpy as np

from octavo.errors import InvalidArgumentError


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def last_position(num_tokens: int, block_size: int) -> tuple[int, int]:
    """Return (index in the block table, offset in the block) of the last of `num_tokens` tokens.

    A sequence that ends on a block edge has its last token at offset block_size - 1, not 0.

    Raises:
        InvalidArgumentError: there is no last token.
    """
    if num_tokens < 1:
        raise InvalidArgumentError(f"a last token needs num_tokens >= 1, got {num_tokens}")
    return divmod(num_tokens - 1, block_size)


def next_position(num_tokens: int, block_size: int) -> tuple[int, int]:
    """Return (index in the block table, offset in the block) of the token after `num_tokens` tokens.

    A sequence that ends on a block edge continues at offset 0 of the next block, which may have to be
    allocated first.
    """
    return divmod(num_tokens, block_size)


def slot_mapping(block_ids: Sequence[int], start: int, stop: int, block_size: int) -> np.ndarray:
    """Return the slots of the positions `start` .. `stop` - 1 of a sequence.

    Costs O(stop - start), however long the sequence is.

    Args:
        block_ids: the sequence's blocks in order.
        start: first position.
        stop: position after the last.
        block_size: tokens per block.

    Returns:
        [stop - start] int64 slots; 64 bits, because block id * block_size exceeds 32 in large caches.

    Raises:
        InvalidArgumentError: the range is not inside the blocks.
    """
    capacity = len(block_ids) * block_size
    if not 0 <= start <= stop <= capacity:
        raise InvalidArgumentError(
            f"positions must satisfy 0 <= start <= stop <= {capacity} (the blocks' capacity), "
            f"got start={start}, stop={stop}; allocate first"
        )
    first = start // block_size
    ids = np.array(block_ids[first : num_blocks_for(stop, block_size)], dtype=np.int64)
    positions = np.arange(start, stop, dtype=np.int64)
    return ids[positions // block_size - first] * block_size + positions % block_size
