"""Ranks on one machine that talk through gloo: tensor parallelism on CPUs, and its test bed."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedModelError
from octavo.parallel.handle import PeerLostError, TensorParallel

# How long an exchange may take. Whoever starts ranks notices much earlier that one is gone (engine/ranks);
# processes that are stopped for an hour go on where they were.
_EXCHANGE_TIMEOUT = timedelta(days=30)


class GlooCollectives:
    """Collectives over a torch process group object; torch's global default group is never touched."""

    def __init__(self, group: Any, size: int) -> None:
        self._group = group
        self._size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks in place and return it: at least in float32, in the order of ranks.

        gloo's own sum begins at another rank in each part of a tensor, so a row's bits would depend on the
        number of rows.
        """
        parts = self.all_gather(tensor)
        total = parts[0].to(torch.promote_types(tensor.dtype, torch.float32))
        for part in parts[1:]:
            total += part
        return tensor.copy_(total)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order."""
        parts = [torch.empty_like(tensor) for _ in range(self._size)]
        self._run(lambda group: group.allgather([parts], [tensor]))
        return parts

    def memory_for(self, tensor: Tensor) -> None:
        """See Collectives: processes on CPUs share none."""

    def describe(self) -> str:
        """See Collectives."""
        return "gloo"

    def abort(self) -> None:
        """Close connections. What waits for a process that has ended needs no more: gloo notices."""
        self._group = None

    def wait_for_end(self, timeout_s: float) -> None:
        """See Collectives."""

    def _run(self, begin: Callable[[Any], Any]) -> None:
        group = self._group
        if group is None:
            raise PeerLostError("this rank has left the others")
        try:
            begin(group).wait()
        except RuntimeError as error:
            raise PeerLostError(f"an exchange with the other ranks failed: {error}") from error


def connect_gloo(rank: int, size: int, rendezvous: Path, *, timeout_s: float = 60.0) -> TensorParallel:
    """Meet the other ranks of this machine and return the handle.

    Args:
        rank: this process' rank.
        size: number of ranks; 1 needs no meeting.
        rendezvous: path of a file that does not exist yet, the same for all ranks. Through it gloo exchanges
            the free ports that it chooses.
        timeout_s: how long to wait for the others.

    Raises:
        UnsupportedModelError: this torch is built without gloo.
        PeerLostError: the ranks did not meet in time.
    """
    if size == 1:
        return TensorParallel()
    # Imported here: a single rank never pays for torch.distributed.
    from torch import distributed

    if not distributed.is_available() or not distributed.is_gloo_available():
        raise UnsupportedModelError("tensor parallelism on a CPU needs a torch built with gloo")
    try:
        group = _meet(rank, size, rendezvous, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {rank} of {size} did not meet the others at {rendezvous}: {error}"
        ) from error
    return TensorParallel(rank, size, GlooCollectives(group, size))


def _meet(rank: int, size: int, rendezvous: Path, timeout: timedelta) -> Any:
    """Build the process group; torch's type stubs leave most of this out, hence Any."""
    from torch import distributed

    api: Any = distributed
    store = api.FileStore(str(rendezvous), size)
    store.set_timeout(timeout)
    options = api.ProcessGroupGloo._Options()
    # Loopback only: all ranks are on this machine, and nothing else may reach them.
    options._devices = [api.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    group = api.ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(_EXCHANGE_TIMEOUT)
    return group
