"""What a replica reports to the router, about once a second."""

import msgspec

from octavo.router.marks import DIGEST_BYTES

MAX_REPORTED_MARKS = 4096


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

    def held(self) -> dict[bytes, int]:
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
