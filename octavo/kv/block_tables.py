"""The block tables of a batch as rows of one array that is appended to, never rebuilt."""

from collections.abc import Sequence

import numpy as np

from octavo.errors import InvalidArgumentError


class BlockTables:
    """Rows of block ids. Which row belongs to which sequence is the caller's choice.

    Attributes:
        table: [max_sequences, max_blocks] int32 block ids; entries past a row's length are stale.
    """

    def __init__(self, max_sequences: int, max_blocks: int) -> None:
        self.table = np.zeros((max_sequences, max_blocks), dtype=np.int32)
        self._lengths = [0] * max_sequences
        # The list that each row mirrors; kept alive, so that no other list gets its id.
        self._sources: list[Sequence[int] | None] = [None] * max_sequences

    def length(self, row: int) -> int:
        """Return the number of valid block ids in a row."""
        return self._lengths[row]

    def update(self, row: int, block_ids: Sequence[int]) -> tuple[int, int]:
        """Update a row to a sequence's block ids; return the range of columns that it wrote.

        Costs O(new blocks) when `block_ids` is the list of the last call, grown at its end:
        `SequenceBlocks.block_ids` changes in no other way without becoming another list. Another list (the
        row's next sequence, or the same after `free`, `truncate` or de-duplication) is written in full.

        Raises:
            InvalidArgumentError: a row cannot hold that many blocks.
        """
        start = self._lengths[row]
        if self._sources[row] is not block_ids or len(block_ids) < start:
            self.rewrite(row, block_ids)
            return 0, len(block_ids)
        if len(block_ids) > start:
            self._write(row, start, block_ids[start:])
        return start, len(block_ids)

    def rewrite(self, row: int, block_ids: Sequence[int]) -> None:
        """Write a whole row; see update."""
        self._write(row, 0, block_ids)
        self._sources[row] = block_ids

    def release(self, row: int) -> None:
        """Forget a row's sequence."""
        self._lengths[row] = 0
        self._sources[row] = None

    def reset(self) -> None:
        """Forget every row's sequence."""
        for row in range(len(self._lengths)):
            self.release(row)

    def rows(self, rows: np.ndarray | Sequence[int], num_columns: int) -> np.ndarray:
        """Gather rows into a new array.

        Args:
            rows: [S] row indexes.
            num_columns: leading columns wanted, at most max_blocks.

        Returns:
            [S, num_columns] int32, C-contiguous; entries past a row's length are stale.

        Raises:
            InvalidArgumentError: more columns than there are.
        """
        self._require_columns(num_columns)
        return self.table[:, :num_columns].take(rows, axis=0)

    def _write(self, row: int, start: int, block_ids: Sequence[int]) -> None:
        stop = start + len(block_ids)
        self._require_columns(stop)
        # Blocks that are gone have negative ids; nobody reads what takes their place.
        np.maximum(np.array(block_ids, dtype=np.int32), 0, out=self.table[row, start:stop])
        self._lengths[row] = stop

    def _require_columns(self, num_columns: int) -> None:
        if num_columns > self.table.shape[1]:
            raise InvalidArgumentError(
                f"a row holds at most max_blocks = {self.table.shape[1]} block ids, got {num_columns}; "
                f"make the tables wider"
            )
