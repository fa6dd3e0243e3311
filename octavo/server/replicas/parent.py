"""The parent process: it forks the front and the replicas, restarts those that die, and ends them all.

Each replica gets its share of the machine: its own GPUs, and an equal part of the CPU cores. Like the parent
of `--restart` (ADR 27), this one forks before PyTorch is imported and has no threads and no device.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from octavo.errors import ConfigError, EngineDeadError
from octavo.server.config import ServerConfig
from octavo.server.supervisor import (
    Child,
    become_child,
    exit_code_of,
    flush_output,
    leaving_signals,
    note_death,
    say,
)

# Exit code for wrong options or a wrong model: a restart would fail the same way.
_CANNOT = 2
_FRONT = -1
# How long replicas get to exit. The front exits first, so they are idle.
_LEAVE_S, _POLL_S = 10.0, 0.05


def take_share(device: str, index: int, num_replicas: int, num_gpus: int, *, dry: bool = False) -> None:
    """Set the environment variables that give this process its share. Call it before importing PyTorch.

    Args:
        device: the engine's option.
        index: this replica's number.
        num_replicas: replicas on this machine.
        num_gpus: GPUs of each replica: tensor_parallel_size.
        dry: only check that the share exists.

    Raises:
        ConfigError: there are fewer GPUs than replicas need, CUDA_VISIBLE_DEVICES names one twice, or the
            device is one GPU.
    """
    found = share_of(device, index, num_replicas, num_gpus, _gpus(), _num_cores())
    if not dry:
        # A thread count that the user sets applies to each replica.
        threads = os.environ.get("OMP_NUM_THREADS", found["OMP_NUM_THREADS"])
        os.environ.update({**found, "OMP_NUM_THREADS": threads})


def share_of(
    device: str, index: int, num_replicas: int, num_gpus: int, gpus: list[str], num_cores: int
) -> dict[str, str]:
    """Return the environment variables of one replica.

    Args:
        device, index, num_replicas, num_gpus: as take_share.
        gpus: GPUs of the machine, named as in CUDA_VISIBLE_DEVICES.
        num_cores: CPU cores that this process may use.

    Raises:
        ConfigError: as take_share.
    """
    if device.startswith("cuda:"):
        raise ConfigError(f"each replica takes GPUs of its own: device must be cuda or auto, got {device!r}")
    variables = {"OMP_NUM_THREADS": str(max(1, num_cores // num_replicas))}
    if device == "cpu" or (device == "auto" and not gpus):
        return variables
    if len(gpus) < num_replicas * num_gpus:
        raise ConfigError(
            f"replicas={num_replicas} of tensor_parallel_size={num_gpus} need {num_replicas * num_gpus} "
            f"GPUs, there are {len(gpus)}"
        )
    own = gpus[index * num_gpus : (index + 1) * num_gpus]
    return {**variables, "CUDA_VISIBLE_DEVICES": ",".join(own)}


def named_gpus(visible: str) -> list[str]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names. Like CUDA, stop at the first invalid name.

    Raises:
        ConfigError: a GPU is named twice; CUDA would then hide all of them.
    """
    names = [name.strip() for name in visible.split(",")]
    found = list(takewhile(lambda name: name.isdigit() or name.startswith(("GPU-", "MIG-")), names))
    if len(set(found)) < len(found):
        raise ConfigError(f"CUDA_VISIBLE_DEVICES={visible!r} names a GPU twice; name each once")
    return found


def _gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return named_gpus(visible)
    # Asking CUDA would initialize it in a process that forks.
    return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Role:
    """The role of a forked process.

    Attributes:
        sockets: [N] unix sockets of the replicas.
        replica: its index; None for the front.
        child: its view of the parent.
        config: its options.
    """

    sockets: tuple[Path, ...]
    replica: int | None
    child: Child
    config: ServerConfig


def fork_replicas(config: ServerConfig, device: str, num_gpus: int) -> Role:
    """Fork a front and `config.replicas` replicas. Returns in each child, never in the parent.

    Args:
        config: the options.
        device: the engine's option.
        num_gpus: GPUs of each replica.

    Raises:
        ConfigError: there are too few GPUs.
        SystemExit: in the parent: the front exited, or a replica cannot start.
        EngineDeadError: in the parent: replicas died more often than `max_restarts` allows.
    """
    take_share(device, 0, config.replicas, num_gpus, dry=True)
    folder = Path(tempfile.mkdtemp(prefix="octavo-"))
    members = _Members(config, device, num_gpus, folder)
    role = None
    try:
        role = members.run()
        return role
    finally:
        if role is None:
            members.end()
            shutil.rmtree(folder, ignore_errors=True)


class _Members:
    """All child processes, from the parent's side."""

    def __init__(self, config: ServerConfig, device: str, num_gpus: int, folder: Path) -> None:
        self._config = config
        self._device = device
        self._num_gpus = num_gpus
        self._sockets = tuple(folder / f"{index}.sock" for index in range(config.replicas))
        self._members: dict[int, int] = {}
        self._deaths: deque[float] = deque()
        self._num_restarts = [0] * config.replicas
        self._is_leaving = False
        self._signals = (signal.SIGCHLD, *leaving_signals())

    def run(self) -> Role:
        """Fork all members, then handle signals; see fork_replicas."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        missing = [_FRONT, *range(self._config.replicas)]
        while True:
            for member in missing:
                role = self._fork(member)
                if role is not None:
                    return role
            missing = []
            if (number := signal.sigwait(self._signals)) != signal.SIGCHLD:
                self._leave(number)
            else:
                missing = [member for member, code in self._ended() if self._is_missed(member, code)]

    def end(self) -> None:
        """Terminate the remaining processes, and kill those that do not exit in time."""
        for number, seconds in ((signal.SIGTERM, _LEAVE_S), (signal.SIGKILL, _LEAVE_S)):
            self._kill(number, *self._members)
            deadline = time.monotonic() + seconds
            while self._members and time.monotonic() < deadline:
                self._ended()
                time.sleep(_POLL_S)

    def _fork(self, member: int) -> Role | None:
        """Fork one member. Return its role in the child, None in the parent."""
        flush_output()
        parent, pid = os.getpid(), os.fork()
        if pid:
            self._members[pid] = member
            return None
        become_child(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        if member == _FRONT:
            return Role(self._sockets, None, Child(), self._config)
        socket = self._sockets[member]
        # A killed replica leaves its socket file behind.
        socket.unlink(missing_ok=True)
        take_share(self._device, member, self._config.replicas, self._num_gpus)
        child = Child(self._num_restarts[member])
        return Role(self._sockets, member, child, replica_config(self._config, socket))

    def _ended(self) -> list[tuple[int, int]]:
        """Return the members that exited, with their exit codes."""
        found: list[tuple[int, int]] = []
        for pid in list(self._members):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                found.append((self._members.pop(pid), exit_code_of(status)))
        return found

    def _is_missed(self, member: int, code: int) -> bool:
        """Return whether a member that exited must be restarted.

        Raises:
            SystemExit: the whole server has to end.
            EngineDeadError: replicas died too often.
        """
        if member == _FRONT:
            if code and not self._is_leaving:
                say(f"octavo: error: the front of the replicas ended with code {code}")
            sys.exit(code)
        if self._is_leaving:
            return False
        if code == _CANNOT:
            sys.exit(code)
        try:
            note_death(self._deaths, self._config)
        except EngineDeadError:
            # No replica may outlive the command unseen.
            self._is_leaving = True
            raise
        self._num_restarts[member] += 1
        return True

    def _leave(self, number: int) -> None:
        """Drain the front; all others end after it. A second signal kills all, unless it is SIGHUP."""
        fronts = [pid for pid, member in self._members.items() if member == _FRONT]
        if self._is_leaving and number == signal.SIGHUP:
            return
        if self._is_leaving:
            self._kill(signal.SIGKILL, *self._members)
        else:
            self._kill(signal.SIGTERM, *fronts)
        self._is_leaving = True

    def _kill(self, number: int, *pids: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def replica_config(config: ServerConfig, socket: Path) -> ServerConfig:
    """Return the options of a replica behind the front. It checks keys and hosts as a lone server does."""
    return replace(
        config,
        uds=str(socket),
        ssl_certfile=None,
        ssl_keyfile=None,
        root_path="",
        # A socket counts as local, but requests to a public address must pass.
        allowed_hosts=config.allowed_hosts if config.is_local else ("*",),
        # A dead engine then answers 503, and the front tries another replica.
        restart=True,
        replicas=1,
    )
