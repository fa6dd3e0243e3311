"""`octavo serve --restart`: a small parent process that starts the server again when its engine dies.

    parent   fork ── waits ──────────────── stands in: 503 ── fork ── stands in ── waits ...
    child         '─ loads ─ serves ─ dies                         '─ loads ─ serves ...

A dead CUDA context takes its process with it, so a new engine needs a new process. The parent forks before
PyTorch is imported, has no thread and no device, and nothing to do while a child serves. See ADR 27.
"""

import asyncio
import ctypes
import os
import signal
import socket
import ssl
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from octavo.errors import EngineDeadError
from octavo.server.config import ServerConfig

_BODY = (
    b'{"error":{"message":"the engine died and is being started again; try again in a few seconds",'
    b'"type":"unavailable_error","param":null,"code":"restarting"}}'
)
_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)
_BACKLOG = 1024
_MAX_HEAD_BYTES, _TIMEOUT_S = 64 << 10, 5.0
# How long to wait for the last clients, in seconds.
_LAST_S = 1.0

# Reports of a child to its parent.
LISTENING, READY, DYING = b"l", b"r", b"d"
# A child whose engine is dead is killed after this time.
_LEAVE_S = 10.0
# How long a child's last reports are read after its end.
_PIPE_S = 1.0
_PR_SET_PDEATHSIG = 1


def listen(config: ServerConfig) -> socket.socket | None:
    """Listen beside a process that serves, or will: the kernel lets processes of one user share a port.

    Returns None for a unix socket, whose path only one process can bind.
    """
    if config.uds is not None:
        return None
    family, kind, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind(address)
        found.listen(_BACKLOG)
    except OSError:
        found.close()
        raise
    return found


class StandIn:
    """Answers 503 to every client that connects. For one event loop; needs neither PyTorch nor granian."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._listening: socket.socket | None = None
        self._tls: ssl.SSLContext | None = None
        self._answering: set[asyncio.Task[None]] = set()

    def open(self, listening: socket.socket) -> None:
        """Begin to answer; the socket stays the caller's."""
        if self._listening is None:
            self._listening, self._tls = listening, self._make_tls()
            listening.setblocking(False)
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def close(self) -> None:
        """Accept whoever has connected, and no more: closing the socket would reset them. Idempotent."""
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._accept(self._listening)
            self._listening = None

    async def finish(self) -> None:
        """Close, and wait a moment for the answers: the event loop's end would drop them."""
        self.close()
        if self._answering:
            await asyncio.wait(self._answering, timeout=_LAST_S)

    def _accept(self, listening: socket.socket) -> None:
        # A task that awaits connections may be cancelled with one in hand, whose client then waits for ever.
        with suppress(BlockingIOError, InterruptedError):
            while True:
                connection, _ = listening.accept()
                task = asyncio.ensure_future(_answer(connection, self._tls))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    def _make_tls(self) -> ssl.SSLContext | None:
        if self._config.ssl_certfile is None:
            return None
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self._config.ssl_certfile, self._config.ssl_keyfile)
        return tls


async def _answer(connection: socket.socket, tls: ssl.SSLContext | None) -> None:
    """Answer one client. One that breaks off, speaks no TLS or takes too long gets no answer."""
    events = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_MAX_HEAD_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
        transport, _ = await events.connect_accepted_socket(
            lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=tls and _TIMEOUT_S
        )
        writer = asyncio.StreamWriter(transport, protocol, reader, events)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(_ANSWER)
                writer.close()
                await writer.wait_closed()
        finally:
            writer.close()


class Child:
    """A forked process's connection to its parent. Without a parent, reports go nowhere.

    Attributes:
        num_restarts: children before this one.
    """

    def __init__(self, num_restarts: int = 0, pipe: int | None = None) -> None:
        self.num_restarts = num_restarts
        self._pipe = pipe

    def tell(self, report: bytes) -> None:
        """Tell the parent one of LISTENING, READY and DYING."""
        if self._pipe is not None:
            os.write(self._pipe, report)


def supervise(config: ServerConfig) -> Child:
    """Fork children that serve, one after the other. Returns in each child, never in the parent.

    Raises:
        SystemExit: in the parent: a child ended on a signal, or the first one could not load.
        EngineDeadError: in the parent: the engine died more often than `max_restarts` allows.
    """
    deaths: deque[float] = deque()
    # This socket is open from a child's death until the next one listens, so that no client is refused.
    listening: socket.socket | None = None
    num_restarts = 0
    while True:
        flush_output()
        reads, writes = os.pipe()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            os.close(reads)
            if listening is not None:
                listening.close()
            become_child(parent)
            return Child(num_restarts, writes)
        os.close(writes)
        life = _ChildLife(config, pid, reads, listening)
        code = asyncio.run(life.run())
        if code == 0 or life.is_leaving or not (life.was_ready or num_restarts):
            sys.exit(code)
        note_death(deaths, config)
        num_restarts += 1
        if config.uds is not None:
            # A killed process leaves its socket behind.
            Path(config.uds).unlink(missing_ok=True)
        listening = life.listening or listen(config)


def become_child(parent: int) -> None:
    """Form a process group of its own, so that only the parent receives Ctrl-C, and end with the parent."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # The parent ended before the line above.
        os._exit(1)


def note_death(deaths: deque[float], config: ServerConfig) -> None:
    """Raise if this was one death too many."""
    now, window_s = time.monotonic(), config.restart_window_s
    deaths.append(now)
    while now - deaths[0] > window_s:
        deaths.popleft()
    if len(deaths) > config.max_restarts:
        raise EngineDeadError(
            f"the engine died {len(deaths)} times within {window_s:g} s: no restart is left"
        )
    say(f"octavo: the engine died; restart {len(deaths)} of {config.max_restarts} within {window_s:g} s")


def flush_output() -> None:
    """Write what is buffered, if that is possible: a forked process would write it again."""
    with suppress(OSError):
        sys.stdout.flush()


def say(text: str) -> None:
    """Print a line on the standard error, which may be full or gone."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def leaving_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a server to drain: SIGHUP too, unless nohup has it ignored."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if is_ignored else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def exit_code_of(status: int) -> int:
    """Return the exit code of a wait status; after a signal it is the one that a shell gives."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


class _ChildLife:
    """One child's life, as its parent sees it.

    Attributes:
        listening: where to stand in for it, None while it answers itself.
        was_ready: its engine was.
        is_leaving: a signal asked it to end.
    """

    def __init__(self, config: ServerConfig, pid: int, reports: int, listening: socket.socket | None) -> None:
        self._config = config
        self._pid = pid
        self._reports = reports
        self._stand_in = StandIn(config)
        self.listening = listening
        self.was_ready = self.is_leaving = False

    async def run(self) -> int:
        """Hand signals on, stand in for the child where it cannot answer, and return its exit code."""
        events = asyncio.get_running_loop()
        ended = asyncio.Event()
        for number in leaving_signals():
            events.add_signal_handler(number, self._hand_on, number)
        events.add_signal_handler(signal.SIGCHLD, ended.set)
        reading = asyncio.ensure_future(self._read())
        if self.listening is not None:
            self._stand_in.open(self.listening)
        while True:
            found, status = os.waitpid(self._pid, os.WNOHANG)
            if found:
                break
            await ended.wait()
            ended.clear()
        # A process that the child forked may hold the pipe open.
        await asyncio.wait((reading,), timeout=_PIPE_S)
        await self._stand_in.finish()
        return exit_code_of(status)

    def _hand_on(self, number: int) -> None:
        self.is_leaving = True
        self._kill(number)

    def _kill(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)

    async def _read(self) -> None:
        """Do what the child's reports ask for, until it has ended."""
        events = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        pipe = os.fdopen(self._reports, "rb", buffering=0)
        transport, _ = await events.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            while report := await reader.read(1):
                if report == READY:
                    self.was_ready = True
                elif report == LISTENING:
                    self._step_back()
                elif report == DYING:
                    events.call_later(_LEAVE_S, self._kill, signal.SIGKILL)
                    self._step_in()
        finally:
            transport.close()

    def _step_in(self) -> None:
        if self.listening is None:
            self.listening = listen(self._config)
        if self.listening is not None:
            self._stand_in.open(self.listening)

    def _step_back(self) -> None:
        self._stand_in.close()
        if self.listening is not None:
            self.listening.close()
            self.listening = None
