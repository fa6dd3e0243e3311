"""The processes of ranks 1, 2, ...: rank 0 starts them, watches them, and ends them.

If a rank has ended, has failed or does not answer, all must end: the others may wait for it in a collective,
which has no timeout. So a thread kills them within a second, and a caller that waits for the engine gets one
error, that of the first rank that failed. A rank ends by itself when rank 0 does.
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import octavo.errors as errors
from octavo.engine.ranks.records import Failed, Record, RecordWire, Report, ReportWire, Setup, encode_record
from octavo.errors import EngineDeadError, OctavoError

Wanted = TypeVar("Wanted", bound=Report)

_PING_S = 0.2
# Pings without an answer before a rank counts as late. Pings are counted, not seconds: while this process
# does not run, it sends none. A thread of the rank answers, even during a long kernel.
_MAX_LATE = 3
# Pings without an answer before a rank counts as dead: while it imports and loads, and afterwards.
_MAX_SILENT_LOADING, _MAX_SILENT = 300, 30
# When one rank ends, others fail because of it, and their reports may arrive first. So reports are
# read for this long before one rank is blamed.
_LAST_REPORTS_S = 0.2
# A killed process closes its wires at once, but ends only when its GPU has let go of it.
_KILL_S = 5.0


@dataclass(slots=True)
class _Follower:
    """One other rank.

    Attributes:
        rank: its number.
        process: its process.
        records: where it reads what to do.
        reports: where it reports.
        arrived: its reports, oldest first; None: no more will come.
        num_silent: pings since it last answered.
        has_ended: its end of the wires is closed.
        failure: its last report, if it failed.
    """

    rank: int
    process: "subprocess.Popen[bytes]"
    records: RecordWire
    reports: ReportWire
    arrived: "SimpleQueue[Report | None]" = field(default_factory=SimpleQueue)
    num_silent: int = 0
    has_ended: bool = False
    failure: Failed | None = None


class Followers:
    """All other ranks.

    Attributes:
        size: ranks in all, this one included.
        error: why they are gone, or None.
        is_loading: they are not ready yet.
    """

    def __init__(
        self, config: Mapping[str, Any], size: int, num_threads: int, on_end: Callable[[OctavoError], None]
    ) -> None:
        """Start a process for each other rank.

        Args:
            config: fields of EngineConfig.
            size: number of ranks.
            num_threads: of each rank, on the host.
            on_end: called once, in any thread, with the reason when they are gone.
        """
        self.size = size
        self.error: OctavoError | None = None
        self.is_loading = True
        self._on_end = on_end
        self._ending = threading.Lock()
        self._has_ended = False
        self._is_over = threading.Event()
        self._all: list[_Follower] = []
        try:
            for rank in range(1, size):
                self._all.append(_start(rank, num_threads))
                # The watching thread finds a process that ended at once.
                with suppress(OSError):
                    self._all[-1].records.send(encode_record(Setup(rank, size, dict(config))))
        except BaseException:
            self.end()
            for follower in self._all:
                follower.reports.close()
            raise
        threading.Thread(target=self._watch, name="octavo-ranks", daemon=True).start()

    def send(self, record: Record) -> None:
        """Send a record to all."""
        encoded = encode_record(record)
        for follower in self._all:
            # The watching thread finds out why.
            with suppress(OSError):
                follower.records.send(encoded)

    def gather(self, kind: type[Wanted]) -> list[Wanted]:
        """Wait for each rank's next report, which must be of this kind.

        Raises:
            OctavoError: a rank has failed.
        """
        reports = [follower.arrived.get() for follower in self._all]
        wanted = [report for report in reports if isinstance(report, kind)]
        if len(wanted) < len(reports):
            raise self.error or EngineDeadError("the other ranks were ended")
        return wanted

    @property
    def late_rank(self) -> int | None:
        """A rank that is ready and has not answered for 0.8 s: it was stopped, or will soon count as dead."""
        late = (follower.rank for follower in self._all if follower.num_silent > _MAX_LATE)
        return None if self.is_loading else next(late, None)

    def wait_for_end(self) -> None:
        """Wait, at most a few seconds, until the watching thread has found that a rank is gone."""
        self._is_over.wait(_KILL_S)

    def end(self, error: OctavoError | None = None) -> None:
        """Kill the processes that are left; only the first call does anything.

        Args:
            error: why; None: nobody waits for them any more.
        """
        with self._ending:
            if self._has_ended:
                return
            self._has_ended = True
            self.error = error
        for follower in self._all:
            follower.process.kill()
        for follower in self._all:
            with suppress(subprocess.TimeoutExpired):
                follower.process.wait(_KILL_S)
            follower.records.close()
            follower.arrived.put(None)
        if error is not None:
            self._on_end(error)
        self._is_over.set()

    def _watch(self) -> None:
        """Read the ranks' reports until the ranks are ended, by this thread or by another."""
        with selectors.DefaultSelector() as selector:
            for follower in self._all:
                selector.register(follower.reports.connection, selectors.EVENT_READ, follower)
            ping_at = time.monotonic()
            while not self._has_ended:
                for key, _ in selector.select(max(0.0, ping_at - time.monotonic())):
                    self._read_report(key.data)
                if time.monotonic() >= ping_at:
                    ping_at = time.monotonic() + _PING_S
                    self._ping()
                if any(self._is_gone(follower) for follower in self._all):
                    self._read_last_reports(selector)
                    self.end(self._reason())
            for follower in self._all:
                follower.reports.close()

    def _read_report(self, follower: _Follower) -> None:
        report = follower.reports.receive()
        if report is True:
            follower.num_silent = 0
        elif report is False:
            follower.has_ended = True
        elif isinstance(report, Failed):
            follower.failure = report
        else:
            follower.arrived.put(report)

    def _read_last_reports(self, selector: selectors.BaseSelector) -> None:
        until = time.monotonic() + _LAST_REPORTS_S
        while (left_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                self._read_report(key.data)
                if key.data.has_ended:
                    # Its closed end would be ready to read for ever.
                    selector.unregister(key.fileobj)
            if not selector.get_map():
                return

    def _ping(self) -> None:
        for follower in self._all:
            follower.num_silent += 1
            with suppress(OSError):
                follower.reports.ping()

    def _is_gone(self, follower: _Follower) -> bool:
        most = _MAX_SILENT_LOADING if self.is_loading else _MAX_SILENT
        return follower.has_ended or follower.failure is not None or follower.num_silent > most

    def _reason(self) -> OctavoError:
        """Say which rank was the first to fail, and how."""
        for follower in self._all:
            if follower.has_ended:
                with suppress(subprocess.TimeoutExpired):
                    follower.process.wait(_KILL_S)
        # Blame killed ranks first, then ranks with an error of their own, last those that lost a peer.
        return self._error_of(min(filter(self._is_gone, self._all), key=_blame_order))

    def _error_of(self, follower: _Follower) -> OctavoError:
        where, failure = f"rank {follower.rank} of {self.size}", follower.failure
        if failure is not None:
            kind = getattr(errors, failure.kind, EngineDeadError) if self.is_loading else EngineDeadError
            return kind(f"{where} failed: {failure.message}")
        code = follower.process.poll()
        if code is None and not follower.has_ended:
            return EngineDeadError(f"{where} has not answered for {follower.num_silent * _PING_S:.0f} s")
        if code is None:
            return EngineDeadError(f"{where} is gone, but its process did not end within {_KILL_S:.0f} s")
        if code < 0:
            return EngineDeadError(f"{where} was killed by {_signal_name(-code)}")
        return EngineDeadError(f"{where} ended with exit code {code}")


def _signal_name(number: int) -> str:
    """Return a signal's name, or its number for real-time signals, which have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _blame_order(follower: _Follower) -> tuple[bool, bool, int]:
    failure = follower.failure
    return failure is not None and failure.is_echo, failure is not None, follower.rank


def _start(rank: int, num_threads: int) -> _Follower:
    """Start a rank's process, which inherits its ends of two connections and nothing else."""
    records, their_records = socket.socketpair()
    reports, their_reports = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs = [their_records.fileno(), their_reports.fileno()]
    with their_records, their_reports:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "octavo.engine.ranks.follower", *map(str, theirs), str(os.getpid())],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=_environment(num_threads),
            start_new_session=True,  # Ctrl-C reaches only rank 0
        )
    return _Follower(rank, process, RecordWire(records), ReportWire(reports))


def _environment(num_threads: int) -> dict[str, str]:
    """Return the environment for other ranks: this process's, the package's path, the number of threads."""
    root = str(Path(__file__).parents[3])
    paths: Sequence[str] = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": str(num_threads), **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
