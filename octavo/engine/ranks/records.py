"""What ranks tell each other: typed records, which hold nothing that could be run, and the sockets they take.

    rank 0 -> others    Setup, Begin, then any number of Prepare, Step, Masks, Reset    by RecordWire
    others -> rank 0    Planned, Met, Ready, Prepared; Failed at any time               by ReportWire

Sockets rather than memory that ranks share: nothing has a name that others could open or that could be left
behind, a reader sleeps until something comes, and both sides notice when the other one ends.
"""

import socket
import struct
import threading
from typing import Any

import msgspec

from octavo.sampling_params import SamplingParams


class Setup(msgspec.Struct, tag=True, array_like=True):
    """The first record.

    Attributes:
        rank: the receiver's.
        size: number of ranks.
        config: fields of EngineConfig.
    """

    rank: int
    size: int
    config: dict[str, Any]


class Begin(msgspec.Struct, tag=True, array_like=True):
    """Meet the others, then load.

    Attributes:
        num_blocks: KV blocks that all ranks have room for.
        rendezvous: path of the file through which ranks meet.
    """

    num_blocks: int
    rendezvous: str


class Prepare(msgspec.Struct, tag=True, array_like=True):
    """Do what StepRunner.prepare does."""


class NewRequest(msgspec.Struct, array_like=True):
    """What steps read of a request and what never changes. Its tokens come with its first step.

    Attributes:
        number: its name in later records.
        num_prompt_tokens: see Request.
        params: likewise.
        seed: likewise.
        stop_token_ids: likewise.
        prompt_logprobs_start: likewise.
    """

    number: int
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    stop_token_ids: list[int]
    prompt_logprobs_start: int | None


class Item(msgspec.Struct, array_like=True):
    """One request's share of a step; see ScheduledRequest.

    Attributes:
        number: which request.
        start: its tokens computed before.
        num_new_tokens: how many tokens of it this step computes.
        samples: the step samples a token for it.
        row: its row of the block tables.
        token_ids: tokens that it got since its last step, as int32.
        block_ids: of each group of layers, blocks likewise; all of its blocks if `are_all`.
        are_all: its block list was replaced since its last step.
    """

    number: int
    start: int
    num_new_tokens: int
    samples: bool
    row: int
    token_ids: bytes
    block_ids: list[bytes]
    are_all: list[bool]


class Step(msgspec.Struct, tag=True, array_like=True):
    """One step; see SchedulerOutput.

    Attributes:
        released: numbers of requests that have ended.
        requests: those that are new.
        items: what is computed.
        block_copies: (source, destination) blocks to copy before.
        num_steps: since the last Reset, how many steps' tokens are in the checksum.
        checksum: of all tokens sampled in those steps.
    """

    released: list[int]
    requests: list[NewRequest]
    items: list[Item]
    block_copies: list[tuple[int, int]]
    num_steps: int
    checksum: int


class Masks(msgspec.Struct, tag=True, array_like=True):
    """Which tokens may come next, within a step that has requests with a grammar.

    Attributes:
        num_rows: R.
        words: [R, ceil(V / 32)] int32, see TokenMasks.fill.
    """

    num_rows: int
    words: bytes


class Reset(msgspec.Struct, tag=True, array_like=True):
    """Forget every request."""


class Planned(msgspec.Struct, tag=True, array_like=True):
    """The rank has planned its memory.

    Attributes:
        num_blocks: KV blocks that it has room for.
    """

    num_blocks: int


class Met(msgspec.Struct, tag=True, array_like=True):
    """The rank has met the others."""


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The rank has loaded its weights and waits for steps."""


class Prepared(msgspec.Struct, tag=True, array_like=True):
    """The rank has done what Prepare asks for."""


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The rank ends.

    Attributes:
        kind: name of the error's class in octavo.errors; "" for any other.
        message: what happened.
        is_echo: it failed because another rank did.
    """

    kind: str
    message: str
    is_echo: bool


Record = Setup | Begin | Prepare | Step | Masks | Reset
Report = Planned | Met | Ready | Prepared | Failed


_LENGTH = struct.Struct("<Q")
_PING = b"\0"
# Largest report: more than any has, less than a socket takes at once.
_MAX_REPORT_BYTES = 2**16
_MAX_MESSAGE_CHARS = 4000


class RecordWire:
    """A stream of records. One thread sends, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder = msgspec.msgpack.Decoder(Record)

    def send(self, encoded: bytes) -> None:
        """Send an encoded record; waits while the receiver is far behind.

        Raises:
            OSError: the receiver has ended.
        """
        self._connection.sendall(encoded)

    def receive(self) -> Record | None:
        """Wait for the next record; None: the sender has ended.

        Raises:
            msgspec.DecodeError: it is none.
        """
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        body = self._read(_LENGTH.unpack(header)[0])
        return None if body is None else self._decoder.decode(body)

    def close(self) -> None:
        """End the stream. Idempotent."""
        self._connection.close()

    def _read(self, length: int) -> bytes | None:
        received = bytearray()
        while len(received) < length:
            piece = self._connection.recv(min(length - len(received), 2**20))
            if not piece:
                return None
            received += piece
        return bytes(received)


def encode_record(record: Record) -> bytes:
    """Return a record as RecordWire sends it."""
    body = msgspec.msgpack.encode(record)
    return _LENGTH.pack(len(body)) + body


class ReportWire:
    """Short messages, each whole or not at all. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._decoder = msgspec.msgpack.Decoder(Report)
        self._sending = threading.Lock()

    def ping(self) -> None:
        """Send a ping, or answer one.

        Raises:
            OSError: the other side has ended, or is too far behind.
        """
        with self._sending:
            self.connection.send(_PING, socket.MSG_DONTWAIT)

    def send(self, report: Report) -> None:
        """Send a report.

        Raises:
            OSError: the other side has ended.
        """
        if isinstance(report, Failed):
            report.message = report.message[:_MAX_MESSAGE_CHARS]
        with self._sending:
            self.connection.send(msgspec.msgpack.encode(report))

    def receive(self) -> Report | bool:
        """Wait for the next message: a report, True for a ping, or False: the other side has ended.

        Raises:
            TimeoutError: nothing came within the connection's timeout.
        """
        try:
            message = self.connection.recv(_MAX_REPORT_BYTES)
        except ConnectionResetError:
            return False
        if message in (b"", _PING):
            return message == _PING
        return self._decoder.decode(message)

    def close(self) -> None:
        """End the connection. Idempotent."""
        self.connection.close()
