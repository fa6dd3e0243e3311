"""Records and reports on sockets between two processes of one machine.

    RecordWire   rank 0 -> another rank: a stream of records of any length
    ReportWire   both ways: short messages, and pings, which a thread answers whatever the others do

Sockets rather than memory that ranks share: nothing has a name that others could open or that could be left
behind, a reader sleeps until something comes, and both sides notice when the other one ends.
"""

import socket
import struct
import threading

import msgspec

from octavo.engine.ranks.records import Failed, Record, Report

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
