"""The parent's side of a child process that answers requests, one at a time, over a socket.

A request and its reply are frames: a header with a number and a length, then so many bytes. The child has the
socket as its standard input. Its first frame, number 0, says that it is ready.
"""

import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence

from octavo.patience import Patience

HEADER = struct.Struct("!QQ")
_PIECE_BYTES = 1 << 20
_LOOK_S = 0.5
# A dead child must not end a process that does not ignore SIGPIPE.
_SEND_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)


class ChildProcess:
    """A child process and the connection to it, for one thread at a time.

    Raises:
        OSError: it cannot be started, or is not ready in time.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        start_s: float,
        wall_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it, and wait until it is ready.

        Args:
            command: program and arguments.
            start_s: how long it may stand still before it is ready; it may work four times as long.
            wall_s: how long a reply may take.
            environment: None: as of this process.
        """
        self._process: subprocess.Popen | None = None
        self._number = 0
        self._connection, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for the parent alone
                )
            self._await_first_frame(Patience(self._process.pid, start_s, 4 * start_s))
            self._connection.settimeout(wall_s)
            self._receive()
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int | None:
        """Process id, or None if there is no process yet."""
        return None if self._process is None else self._process.pid

    def ask(self, request: bytes) -> bytes:
        """Send a request and return its reply. After an error, stop the child.

        Raises:
            TimeoutError: there is no reply in time.
            OSError: the child died.
        """
        self._number += 1
        self._connection.sendall(HEADER.pack(self._number, len(request)), _SEND_FLAGS)
        self._connection.sendall(request, _SEND_FLAGS)
        return self._receive()

    def stop(self) -> int | None:
        """Kill the child if it still runs; return its exit code, which is negative for a signal."""
        if self._process is not None:
            self._process.kill()
        self._connection.close()
        return None if self._process is None else self._process.wait()

    def disown(self) -> None:
        """Let go of the child, in a process forked from its parent."""
        self._connection.close()
        if self._process is not None:
            self._process.returncode = 0  # or Popen would wait for a child of another process

    def _await_first_frame(self, patience: Patience) -> None:
        self._connection.settimeout(min(_LOOK_S, patience.idle_s))
        while True:
            try:
                self._connection.recv(1, socket.MSG_PEEK)
                return
            except TimeoutError:
                if not patience.lasts():
                    raise

    def _receive(self) -> bytes:
        number, length = HEADER.unpack(self._read(HEADER.size))
        if number != self._number:
            raise ConnectionError(f"expected reply {self._number}, got {number}")
        return self._read(length)

    def _read(self, length: int) -> bytes:
        received = bytearray()
        while len(received) < length:
            piece = self._connection.recv(min(length - len(received), _PIECE_BYTES))
            if not piece:
                raise ConnectionError("the child process ended")
            received += piece
        return bytes(received)
