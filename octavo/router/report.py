"""What a replica tells a router about itself, about once a second."""

import msgspec

from octavo.router.marks import DIGEST_BYTES

MAX_REPORTED_MARKS = 4096


class Report(msgspec.Struct, frozen=True, array_like=True):
    """One replica, as it is now.

    Attributes:
        state: EngineLoop.state, or "stalled" while a rank is silent; only "ready" replicas get requests.
        digests: marks whose blocks are in the prefix tree, DIGEST_BYTES each, at most MAX_REPORTED_MARKS.
        tokens: prompt tokens that each of them stands for.
        free_tokens: tokens that fit in blocks that nobody reads; cached ones count.
        num_running: completions in the running set.
        num_waiting: completions that wait for admission.
        num_waiting_tokens: prompt tokens of these.
        bytes_per_token: of prompts noted so far, as marks measure them; 0 before the first.
    """

    state: str
    digests: bytes = b""
    tokens: tuple[int, ...] = ()
    free_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    bytes_per_token: float = 0.0

    def held(self) -> dict[bytes, int]:
        """Return tokens by mark."""
        starts = range(0, len(self.digests), DIGEST_BYTES)
        digests = (self.digests[start : start + DIGEST_BYTES] for start in starts)
        return dict(zip(digests, self.tokens[:MAX_REPORTED_MARKS], strict=False))

    def encode(self) -> bytes:
        """Return it as MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "Report":
        """Read what `encode` wrote.

        Raises:
            msgspec.DecodeError: it is no report.
        """
        return msgspec.msgpack.decode(data, type=cls)
