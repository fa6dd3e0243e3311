"""In a replica: the block at which each mark ends, whether it is still cached, and the report about it."""

from array import array
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from octavo.kv.sequence_blocks import SequenceBlocks
from octavo.router.marks import DIGEST_BYTES, Marks

MAX_REPORTED_MARKS = 4096
REPORT_PATH = "/octavo/report"
"""Returns a replica's report, but only to requests with the marks header, which clients cannot send."""
# The sums of bytes and tokens are halved at twice this many tokens, so that old prompts count less.
_MEMORY_TOKENS = 1 << 16


class Report(msgspec.Struct, frozen=True, array_like=True):
    """The state of one replica.

    Attributes:
        state: EngineLoop.state, or "stalled" while a rank is silent; only "ready" replicas get requests.
        digests: cached marks, joined, DIGEST_BYTES each, at most MAX_REPORTED_MARKS.
        tokens: prompt tokens up to each mark.
        free_tokens: tokens that fit into blocks that no running request uses, cached blocks included.
        num_running: completions that run.
        num_waiting: completions that wait for admission.
        num_waiting_tokens: their prompt tokens.
        bytes_per_token: average over recent prompts; 0 before the first.
    """

    state: str
    digests: bytes = b""
    tokens: tuple[int, ...] = ()
    free_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    bytes_per_token: float = 0.0

    def cached_marks(self) -> dict[bytes, int]:
        """Return a map from each mark to its tokens."""
        starts = range(0, len(self.digests), DIGEST_BYTES)
        digests = (self.digests[start : start + DIGEST_BYTES] for start in starts)
        return dict(zip(digests, self.tokens[:MAX_REPORTED_MARKS], strict=False))

    def encode(self) -> bytes:
        """Encode as MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "Report":
        """Decode what `encode` wrote.

        Raises:
            msgspec.DecodeError: `data` is not a report.
        """
        return msgspec.msgpack.decode(data, type=cls)


class Ledger:
    """A bounded LRU map from marks of recent prompts to the KV block at which each mark ends.

    The longest marks of a prompt are evicted first, so the top of the prefix tree stays. A mark of token
    ids is exact. A mark of text is placed in proportion to its bytes and rounded down to a whole block.

    Attributes:
        bytes_per_token: average over recent prompts; 0 before the first.
    """

    def __init__(self, max_marks: int = MAX_REPORTED_MARKS) -> None:
        self._max_marks = max_marks
        self._blocks: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        # Marks whose blocks have not been in the prefix tree since they were recorded.
        self._awaited: set[bytes] = set()
        self._num_bytes = self._num_tokens = 0.0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def bytes_per_token(self) -> float:
        return self._num_bytes / self._num_tokens if self._num_tokens else 0.0

    def note(self, marks: Marks, token_ids: "array[int]", salt: bytes, block_size: int) -> None:
        """Record a prompt.

        Args:
            marks: the request's marks.
            token_ids: the prompt after templating and tokenization.
            salt: the salt of the keys of its blocks.
            block_size: tokens per block.
        """
        if not marks.digests or not token_ids:
            return
        num_tokens = len(token_ids)
        self._measure(marks.num_bytes, num_tokens)
        ends = [end * num_tokens // marks.num_bytes // block_size for end in marks.ends]
        blocks = SequenceBlocks(block_size, salt)
        blocks.extend_keys(token_ids, ends[-1])
        for digest, num_blocks in zip(reversed(marks.digests), reversed(ends), strict=True):
            if num_blocks:
                self._blocks[digest] = (blocks.block_keys[num_blocks - 1].digest, num_blocks * block_size)
                self._blocks.move_to_end(digest)
                self._awaited.add(digest)
        while len(self._blocks) > self._max_marks:
            self._awaited.discard(self._blocks.popitem(last=False)[0])

    def cached_marks(self, is_registered: Callable[[bytes], bool]) -> tuple[bytes, tuple[int, ...]]:
        """Return the marks whose blocks are cached now, with their lengths in tokens.

        Drops the marks whose blocks were evicted. Marks of prompts that still wait for prefill stay.

        Args:
            is_registered: whether the prefix tree has a block with this digest.

        Returns:
            The digests of the marks, joined, and tokens up to each mark.
        """
        cached = {mark: tokens for mark, (block, tokens) in self._blocks.items() if is_registered(block)}
        self._awaited.difference_update(cached)
        for digest in [mark for mark in self._blocks if mark not in cached and mark not in self._awaited]:
            del self._blocks[digest]
        return b"".join(cached), tuple(cached.values())

    def _measure(self, num_bytes: int, num_tokens: int) -> None:
        self._num_bytes += num_bytes
        self._num_tokens += num_tokens
        if self._num_tokens > 2 * _MEMORY_TOKENS:
            self._num_bytes /= 2
            self._num_tokens /= 2
