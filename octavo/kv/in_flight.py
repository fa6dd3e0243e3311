"""Which full blocks are being computed right now, so that equal prompts can wait for them."""

from octavo.kv.sequence_blocks import SequenceBlocks


class InFlightBlocks:
    """Counts, per block digest, the sequences that announced to compute it.

    A hint for scheduling only: a wrong answer costs time, never a wrong token.

    Attributes:
        counts: announcements by digest; only positive counts are kept.
    """

    def __init__(self) -> None:
        self.counts: dict[bytes, int] = {}

    def announce(self, sequence: SequenceBlocks, stop: int) -> None:
        """Announce the sequence's blocks up to index `stop` (exclusive); they must have keys."""
        start = sequence.announced.stop
        if stop > start:
            for key in sequence.block_keys[start:stop]:
                self.counts[key.digest] = self.counts.get(key.digest, 0) + 1
            sequence.announced = range(sequence.announced.start, stop)

    def withdraw_before(self, sequence: SequenceBlocks, index: int) -> None:
        """Withdraw the blocks before `index`, which are computed; they are never announced again."""
        announced = sequence.announced
        if index > announced.start:
            self._subtract(sequence, announced.start, min(index, announced.stop))
            sequence.announced = range(index, max(index, announced.stop))

    def withdraw_from(self, sequence: SequenceBlocks, index: int) -> None:
        """Withdraw the blocks from `index` on; they may be announced again."""
        announced = sequence.announced
        if index < announced.stop:
            self._subtract(sequence, max(index, announced.start), announced.stop)
            sequence.announced = range(min(index, announced.start), index)

    def is_announced_by_another(self, sequence: SequenceBlocks, index: int) -> bool:
        """True when a sequence other than this one announced a block equal to its block `index`."""
        digest = sequence.block_keys[index].digest
        return self.counts.get(digest, 0) > (index in sequence.announced)

    def _subtract(self, sequence: SequenceBlocks, start: int, stop: int) -> None:
        for key in sequence.block_keys[start:stop]:
            self.counts[key.digest] -= 1
            if self.counts[key.digest] == 0:
                del self.counts[key.digest]
